"""What a run will need, before it starts: memory of each rank and engine, disk and time, on devices that need not be
here."""
