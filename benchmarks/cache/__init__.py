"""Parts of the cache benchmarks. What runs in a foreign environment imports nothing of ours but
`recipe` and `serve`, which need only the standard library."""
