"""A node's decisions with a model of its engine and its media."""
