"""Preflight: nodes, ranks and links are tried before training."""
