"""Here are the port that every tier implements, the tiers that are not the disk, and tiers as one.

Limits and the choice of what to evict, demote or refuse are here too; they do no I/O.
"""
