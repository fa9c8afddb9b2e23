"""Measured against predicted: rows of a table become layouts, get priced, and are compared."""
