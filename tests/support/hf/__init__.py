"""The reference engine's tests: an engine alone, workers and gateways served, processes."""
