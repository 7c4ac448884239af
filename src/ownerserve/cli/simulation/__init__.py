"""The commands `ownerserve simulate` and `ownerserve evaluate`."""
