"""Reinforcement learning: pipeline.py is the story, the other files its parts."""
