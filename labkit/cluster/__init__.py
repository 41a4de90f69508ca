"""Ranks that SLURM or torchrun starts; they and the notebook speak through files in a run directory."""
