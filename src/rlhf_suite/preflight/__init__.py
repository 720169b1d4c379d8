"""All that is looked at before a run: its flags and the rules between them, the machine, files, servers and folders."""
