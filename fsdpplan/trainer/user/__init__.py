"""User: models of a user's own, and weights from files."""
