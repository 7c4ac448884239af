"""Layouts say where an engine's memory has what the canonical frame has, as runs of addresses."""
