"""This folder knows what a node holds and which sessions it owns, and tells gateways and the
directory of both."""
