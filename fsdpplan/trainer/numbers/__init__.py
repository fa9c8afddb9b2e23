"""Numbers: a tiny step on the plan's own mesh, against one process."""
