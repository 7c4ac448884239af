"""Ownership of sessions: what a node holds, what it tells gateways and the directory of it, and
which sessions it owns."""
