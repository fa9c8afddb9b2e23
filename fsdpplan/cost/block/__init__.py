"""Block: a transformer block as one list of operators, made from what it computes."""
