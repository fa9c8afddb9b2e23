"""NCCL: the environment of the ranks, each variable with the evidence that sets it."""
