"""Nodes that compute for one another, under a clock that is not the world's."""
