"""The directory as a service: msgpack messages over ZeroMQ, on loopback."""
