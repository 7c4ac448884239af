"""The admin API: what its answers are made of, the table of its endpoints, and its description."""
