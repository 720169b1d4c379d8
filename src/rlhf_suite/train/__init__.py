"""One trainer for every supervised task, and the parts PPO shares with it."""
