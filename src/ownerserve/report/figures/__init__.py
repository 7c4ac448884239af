"""Figures of the evaluation: each a function from plain data to a matplotlib Figure."""
