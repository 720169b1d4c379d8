"""The HTTP server that answers reward requests, and the batching of concurrent requests."""
