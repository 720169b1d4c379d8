"""A post-training suite for language models: `python run.py task=<task> group.flag=value ...`."""

import gc

# Every process imports libraries with a million objects that stay. To look through all of them again and again takes a
# sixth of the time of these imports; younger objects are collected as often as ever.
gc.set_threshold(700, 10, 100)
