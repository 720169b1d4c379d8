"""Rollout engines: vLLM in Ray actors, and the driver's side of them."""
