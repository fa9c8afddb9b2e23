"""Configurations of other tools, read as the options that ask for the same."""
