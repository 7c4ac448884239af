"""The cost model knows what things cost, as measured: loads per tier, prefill, replay, queues; and
how wrong that is.
"""
