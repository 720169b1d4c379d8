"""One file per task; `rlhf_suite.tasks.<name>.run` is what `task=<name>` runs."""
