"""The record of a run: its folder, its metrics and where they are sent, and what the console shows."""
