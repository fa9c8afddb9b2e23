"""Conclude: what the numbers of one machine, and of many beside each other, mean."""
