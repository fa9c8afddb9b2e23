"""Bounds: as few layouts priced as find what pricing all would."""
