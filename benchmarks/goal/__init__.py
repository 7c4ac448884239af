"""The goal's evidence: many draws, every rival (benchmarks/goal_draws.py)."""
