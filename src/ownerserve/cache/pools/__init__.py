"""Pools hold the slots of one cache: how many each component has, which are free, what is evicted
for more.
"""
