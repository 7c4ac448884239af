"""This package makes seeded workloads. Same options, same bytes: all randomness is a PCG64 per
session."""
