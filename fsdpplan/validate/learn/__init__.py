"""What measured runs say of predicted step times."""
