"""Weights from the trainer to the engines, and the proof that they arrived."""
