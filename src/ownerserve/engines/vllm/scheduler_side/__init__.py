"""This folder is the half of the connector that runs beside vLLM's scheduler, with the threads that
it starts.

Turns, restores, ownership and what the worker tells of itself are here; no byte of KV moves here.
"""
