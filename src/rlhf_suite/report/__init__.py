"""Pictures and tables made from a finished run's folder."""
