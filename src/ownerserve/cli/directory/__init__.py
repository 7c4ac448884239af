"""The commands `ownerserve directory ...`."""
