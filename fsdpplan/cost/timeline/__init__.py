"""The predicted step as events on streams."""
