"""This package has the commands `ownerserve transfer ...`."""
