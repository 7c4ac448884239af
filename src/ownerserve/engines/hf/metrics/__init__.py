"""This folder is what a worker tells of itself: dated status, and its Prometheus metrics. Decides
nothing."""
