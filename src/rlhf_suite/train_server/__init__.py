"""Training served over HTTP in the protocol of Tinker: its messages, its futures, and several models on one policy."""
