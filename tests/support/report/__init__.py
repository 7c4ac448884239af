"""Data of every figure."""
