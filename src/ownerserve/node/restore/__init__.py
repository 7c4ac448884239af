"""This folder brings a turn's state back: the search for it, the plan, the loads and prefetches,
and the device that takes it in. Pure."""
