"""What the machine and its network are."""
