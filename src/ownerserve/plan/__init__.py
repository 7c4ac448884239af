"""The planner knows what a restore costs, which way back is cheapest, what to checkpoint and when.

Pure: plain data in, plain data out. It never reads a clock, a file, a cache or a store; a node
hands it what it knows and feeds it what was measured.
"""
