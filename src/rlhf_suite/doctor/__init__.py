"""What a machine lacks for runs of this suite, found in seconds and without Ray: `rlhf-suite doctor`."""
