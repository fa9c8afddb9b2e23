"""Enumerate layouts, judge their legality, rank them."""
