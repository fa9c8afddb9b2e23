"""What is printed: screens for people, JSON for programs."""
