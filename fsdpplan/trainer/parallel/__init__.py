"""Parallel: a model over ranks, by splits, shards and stages, in one order of steps."""
