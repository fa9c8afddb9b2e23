"""From options to the values that the other rooms take."""
