"""Rollout engines: vLLM in Ray actors, and the driver's handles to them."""
