"""Network: the time of one collective, by its bytes and by where its group lies."""
