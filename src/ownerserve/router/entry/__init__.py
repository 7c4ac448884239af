"""The entry of a turn: what stands in line before the fleet, in which order, until when, and whom
limits turn away."""
