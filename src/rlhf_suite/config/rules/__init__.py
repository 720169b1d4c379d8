"""Rules between flags, one file for each subject. A rule holds for the runs in its signature."""
