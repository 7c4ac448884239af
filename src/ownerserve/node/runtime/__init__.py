"""This folder performs a node's effects over an engine and a store, measures what they cost, and
says it."""
