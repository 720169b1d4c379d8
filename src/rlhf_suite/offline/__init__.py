"""Offline jobs that turn the rows of files into rows of another file: generate responses, and score them."""
