"""Tracing joins a turn's work here to the trace that its client began, and to the worker's part."""
