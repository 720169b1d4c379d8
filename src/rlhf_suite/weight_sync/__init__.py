"""Sending the trainer's weights to the rollout engines, and proving that they arrived."""
