"""Engine adapters: each translates one engine, and none imports another."""
