"""This package has the experiments on seed 001's claims."""
