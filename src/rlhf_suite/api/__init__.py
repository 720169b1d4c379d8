"""The suite from Python, `import rlhf_suite as rs`: the same configuration, checks and runs as the command line."""
