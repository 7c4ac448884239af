"""The kv package is the model of KV state: units, ids, specs, registry, geometry, prefix chains,
messages.

The bottom layer. Pure data and arithmetic: no clock, socket, thread, tensor or randomness.
"""
