"""Disk to spec and back: plans, profiles, model configs."""
