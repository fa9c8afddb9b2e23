"""Hugging Face: a local `config.json` as a model."""
