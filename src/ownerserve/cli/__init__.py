"""This package is the ownerserve command: wiring only."""
