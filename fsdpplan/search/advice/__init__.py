"""Advice: reasons, remedies and other ways, each tried before it is said."""
