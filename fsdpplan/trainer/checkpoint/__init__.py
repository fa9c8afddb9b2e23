"""Checkpoint: saves that lose nothing, written beside training and checked when read."""
