"""Rules: which layouts can be trained at all, said before anything is priced."""
