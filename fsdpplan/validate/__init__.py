"""Measured against predicted."""
