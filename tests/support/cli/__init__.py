"""Commands run in forks of one warm process."""
