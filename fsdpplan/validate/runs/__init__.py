"""Runs: rows of a table as models, clusters and layouts."""
