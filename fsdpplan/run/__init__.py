"""From text to processes: run a job here or by Slurm, follow it, compare it with its plan."""
