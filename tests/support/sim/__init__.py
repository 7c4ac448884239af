"""The simulator's parts driven alone, and small fleets on generated agents."""
