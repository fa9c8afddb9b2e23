"""Rehearse: a plan's own program at its full size without its machines."""
