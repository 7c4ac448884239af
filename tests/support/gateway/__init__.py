"""A gateway on real sockets between fake engines and clients."""
