"""Rollout engines: vLLM in Ray actors, and the driver's handles to them.

Read `data.generation` first (what goes into an engine and what comes out), then `pool.py` (the driver's side) and
`actor.py` (the engine's side), whose thread is in `step_loop.py`. `start.py` starts the engines of a run.
"""
