"""The report of a run, made from its folder: a page (start at `html.py`), and at its end pictures and a summary
(`summary.py`)."""
