"""This package holds the gateway's conversation with each worker beside its turns: probes,
inventories and RPC."""
