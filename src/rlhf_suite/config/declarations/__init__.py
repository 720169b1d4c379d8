"""The flags: one file per section, the runs that have them, and how a flag is declared. Start at `runs.py`."""
