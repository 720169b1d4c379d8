"""Typed flags: one file per section, one root per task (runs.py). Imports nothing heavy."""
