"""The figures that a worker tells of itself: dated status, and its Prometheus metrics. Decides
nothing."""
