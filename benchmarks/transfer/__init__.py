"""The sides of the TCP benchmark: for each contender, what lends and what reads."""
