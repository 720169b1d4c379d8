"""Episodes of agents: turns of the model and steps of environments, token by token."""
