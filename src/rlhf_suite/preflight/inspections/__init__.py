"""The last part of the preflight: inspect files, servers and this machine before anything heavy is imported.

The rules in `config` compare flags with flags. An inspection compares a flag with the world: whether a file
exists and can be read, whether a folder can be written, whether a server answers. Each file here inspects one subject,
and `inspect_runs.py` does all inspections but those of `named_files.py`, which are as fast as the rules, and are
reported together with them. An inspection must take well under a second and import nothing heavy. What the user wrote
is run at the end, in a process of its own, where nothing else is wrong (`own_code`).
"""
