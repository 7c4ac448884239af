"""One simulated worker, and transfers between two."""
