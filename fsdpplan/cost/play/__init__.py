"""Programs played: when each operation begins and ends."""
