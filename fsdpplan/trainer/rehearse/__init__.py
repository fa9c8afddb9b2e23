"""Rehearse: one rank of any world in one process, without memory."""
