"""The TCP mover brings lent bytes from another host: authenticated, gathered, digested on the way.

    wire        the frames, and what reads them
    handshake   who is there: nonces, proofs, the keys of one connection
    gather      runs of memory as lists that the kernel reads and writes
    settings    the key, the interface and the address that a side is bound to
    server      the side that lends
    client      the side that reads, a `Mover`; `line` is one connection of it

What goes over the wire is authenticated and not encrypted (docs/transfer.md).
"""
