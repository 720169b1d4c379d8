"""The jobs of a sweep: the command line of each, and the processes or Slurm jobs that run them."""
