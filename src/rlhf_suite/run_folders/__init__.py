"""The folders of runs and sweeps: where their files are, the configuration that a run was started with, and what may
change when it goes on."""
