"""What a run is made of: setup, granted abilities, planned faults."""
