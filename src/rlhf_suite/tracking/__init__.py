"""What a run reports while it goes on: its metrics and where they are sent, and what the console shows.

Tasks write through `journal.py`, which uses `metrics.py` (files and services), `console.py` (the progress bar) and
`run_folders/run_folder.py` (paths and `status.json`).
"""
