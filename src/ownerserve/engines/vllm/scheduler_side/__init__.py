"""The half of the connector that runs beside vLLM's scheduler, and the threads that it starts.

Turns, restores, ownership and what the worker tells of itself are here; no byte of KV moves here.
"""
