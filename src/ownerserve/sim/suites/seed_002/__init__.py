"""This package has the experiments on seed 002's claims."""
