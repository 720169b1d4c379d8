"""Reinforcement learning. Start at pipeline.py, which names the steps; the other files are those steps."""
