"""Compare: predicted beside measured, and the errors."""
