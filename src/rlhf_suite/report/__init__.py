"""The report of a finished run: curves, sample responses and a summary, made from its folder. Start at `summary.py`."""
