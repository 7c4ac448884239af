"""This package has the commands `ownerserve simulate` and `ownerserve evaluate`."""
