"""The bookkeeping of RL as pure functions: KL, advantages, shaping, pass@k, layouts."""
