"""Rules between flags, one file for each subject. A rule is for the tasks that `@rule` names; `check_run.py` runs all of
them."""
