"""Serving a reward model over HTTP: the server, the route, and the batching of concurrent requests."""
