"""This package is one engine of the simulator: its steps, its batch, and how long a step takes."""
