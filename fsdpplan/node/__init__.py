"""Programs whose text travels to the nodes of a job: the standard library alone."""
