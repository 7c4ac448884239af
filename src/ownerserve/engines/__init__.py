"""Engine adapters translate one engine each, and none imports another."""
