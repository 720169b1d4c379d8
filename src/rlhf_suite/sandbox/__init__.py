"""Running untrusted Python programs, with limits on what they can reach, use and print."""
