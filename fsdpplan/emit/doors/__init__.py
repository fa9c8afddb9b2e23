"""The same plan for other programs and launchers, as text."""
