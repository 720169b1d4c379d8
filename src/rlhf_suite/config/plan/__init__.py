"""What follows from the flags of a run and the machine, decided before anything starts. Start at `run_plan.py`."""
