"""This folder decides what a node puts away and when: idle sessions' spills, copies under
pressure, running turns' saves, checkpoints, and what a record or a soft reference is worth
keeping for. Pure."""
