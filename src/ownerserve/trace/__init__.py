"""Workloads: trace readers, synthesizers and statistics. Pure; no clock and no network."""
