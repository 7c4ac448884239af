"""A fleet of real processes for a long time, under agents, with faults drawn."""
