"""Engine adapters. Each translates one engine; none imports another."""
