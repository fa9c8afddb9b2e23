"""Calibrate: the measuring program is started and followed."""
