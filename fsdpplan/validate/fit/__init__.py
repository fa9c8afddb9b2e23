"""Fit: the programs that fit what profiles hold."""
