"""This package speaks HTTP on both sides of the gateway: connections, messages, heads and the
gateway's own replies."""
