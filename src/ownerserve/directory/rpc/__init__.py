"""The directory as a service speaks msgpack messages over ZeroMQ, on loopback, or with the fleet's
key anywhere.
"""
