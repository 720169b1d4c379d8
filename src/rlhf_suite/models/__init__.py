"""Models: loading, the one forward pass, and writing weights out."""
