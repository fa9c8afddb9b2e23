"""Kernels: seconds of blocks, head and optimizer on one rank, communication apart."""
