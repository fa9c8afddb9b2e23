"""Text to processes: local torchrun and Slurm."""
