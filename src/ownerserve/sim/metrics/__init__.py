"""This package says what a simulated run did: rows a turn, counters, samples over time, and their
summary."""
