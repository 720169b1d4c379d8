"""`hydra/launcher=local` and `hydra/launcher=slurm`. Hydra imports this in every application: nothing heavy here."""
