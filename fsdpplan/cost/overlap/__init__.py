"""Overlap: streams that run side by side; what a step waits for falls out."""
