"""Slurm: the job script, part by part, and what checks a node."""
