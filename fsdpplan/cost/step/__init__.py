"""The step as a program: what a rank does, in order, and what each operation waits for."""
