"""This package has the commands `ownerserve directory ...`."""
