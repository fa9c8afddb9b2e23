"""What training programs of others can say of a plan: a table and a function each, which their
doors (`emit/doors/`) and the search both read."""
