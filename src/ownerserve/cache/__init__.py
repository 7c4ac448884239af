"""HeteroCache: what a worker keeps in device memory, decided block by block. No torch."""
