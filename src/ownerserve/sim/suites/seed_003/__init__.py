"""This package has the experiments on seed 003's claims."""
