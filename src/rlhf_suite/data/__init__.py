"""Data: from the rows of any source to batches of token ids.

Read `load.py` first: it finds the rows of a source (`sources`, `files`, `row`), has them encoded by the encoder of the
task (`text_encoders`, `preferences`, `steps`, through `encode`) and keeps the result (`store`, `cache`). `batch` is the
one layout of a batch, `packing` and `sampler` decide what is in it, and `trajectory` is the record of a rollout.
"""
