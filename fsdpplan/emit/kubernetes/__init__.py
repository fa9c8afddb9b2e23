"""Kubernetes manifests: TrainJob, PyTorchJob, JobSet and Volcano Job."""
