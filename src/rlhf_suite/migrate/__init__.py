"""Commands of OpenRLHF become command lines of this suite: reading scripts, and converting flags."""
