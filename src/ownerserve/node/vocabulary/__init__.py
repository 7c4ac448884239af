"""This folder is what the parts of a node say to each other: events and effects, names of
records, tips, prefix digests, settings. Data and arithmetic; the folder imports no other part of
the node."""
