"""Losses: pure functions of per-token tensors, each returning a sum over its units (`reduce`) and its metrics."""
