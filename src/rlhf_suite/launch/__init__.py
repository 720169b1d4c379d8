"""Bringing a run up: its environment, its Ray cluster, its actors' logs, and waits that have a name and a deadline."""
