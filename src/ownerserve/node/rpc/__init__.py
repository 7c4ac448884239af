"""This folder is the node's port to the fleet: msgpack messages over ZeroMQ, loopback unless said
otherwise."""
