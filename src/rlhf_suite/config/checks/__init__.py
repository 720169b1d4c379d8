"""Rules that hold between flags: run.py lists them by task, the other files hold them by subject."""
