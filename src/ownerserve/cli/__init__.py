"""The ownerserve command: wiring only."""
