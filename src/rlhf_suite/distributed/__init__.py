"""The ranks that work on one model: Ray actors called as one group, and their collectives."""
