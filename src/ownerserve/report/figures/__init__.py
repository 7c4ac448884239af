"""This package has the figures of the evaluation: each is a function from plain data to a
matplotlib Figure."""
