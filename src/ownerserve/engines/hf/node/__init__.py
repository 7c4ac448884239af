"""This folder is the engine's side of a node: its slots as bytes, who waits for state, what steps
cost."""
