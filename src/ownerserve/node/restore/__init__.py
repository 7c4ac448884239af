"""How a turn's state comes back: the search for it, the plan, the loads and prefetches, and the
device that takes it in. Pure.
"""
