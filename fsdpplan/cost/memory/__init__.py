"""Memory: bytes on one rank at each moment of its step, and the highest of them."""
