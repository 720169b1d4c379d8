"""Starting a run: its environment, Ray cluster and placement, logs of actors, signals, and waits with a deadline."""
