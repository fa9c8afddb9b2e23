"""Runs: tables of measured runs, kernels and calibrations."""
