"""Movers bring lent bytes into this process's memory, each by another road, behind one contract."""
