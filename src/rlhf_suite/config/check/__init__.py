"""One flag at a time: its name, its value, the file that it names, and how a mistake is told."""
