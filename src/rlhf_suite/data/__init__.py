"""Rows of any source to batches of tokens: `rows` and `builtin`, then `chat`, then `batch`, `packing` and `sampler`."""
