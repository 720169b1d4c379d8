"""One file per task: `task=<name>` runs the function `rlhf_suite.tasks.<name>.run`."""
