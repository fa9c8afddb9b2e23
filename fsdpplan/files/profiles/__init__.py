"""Profiles: hardware profiles as files, each number with its source."""
