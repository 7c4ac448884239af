"""This package holds all workers and gateways of a run: dispatch, ownership, line, and what each is
told."""
