"""This package has one simulated worker, and transfers between two."""
