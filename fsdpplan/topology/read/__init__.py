"""Read: the texts and codes of a machine become numbers; the only place that asks it."""
