"""Rolling out: what an operator may change while turns run, and what is counted of it by arm."""
