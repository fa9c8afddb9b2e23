"""Model: the reference decoder and its loss."""
