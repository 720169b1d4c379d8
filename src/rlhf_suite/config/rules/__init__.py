"""Rules between flags, one file for each subject, each for the tasks that `@rule` names; `check_run.py` runs them."""
