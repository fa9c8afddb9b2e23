"""Calibrate: numbers of a machine out of what was timed on it."""
