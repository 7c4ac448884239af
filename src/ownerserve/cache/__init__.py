"""The cache (HeteroCache) decides block by block what a worker keeps in device memory. No torch."""
