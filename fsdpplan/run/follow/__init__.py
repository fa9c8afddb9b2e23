"""Follow: what a job says and does while it runs, and how its runs stand."""
