"""Text: tokens of files, and which of them a rank sees."""
