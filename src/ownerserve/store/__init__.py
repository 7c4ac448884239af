"""The artifact store keeps what is sealed on host memory, disk and remote tiers.

A read gives the bytes that were written under that id, verified, or a miss; never other bytes.
Tiers and their runtimes do I/O; `policy` decides and does none.
"""
