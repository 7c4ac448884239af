"""NodeTransfers let a node's state be read by other nodes, and bring theirs: lends, brings, and the
thread on which transfer's control runs.
"""
