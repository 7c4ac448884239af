"""This package says what a run is made of: setup, granted abilities, planned faults."""
