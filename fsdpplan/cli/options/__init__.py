"""The options of commands: how each is declared, read, and grouped."""
