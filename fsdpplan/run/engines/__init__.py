"""Engines: Slurm, Kubernetes and this host, each as what runs a job."""
