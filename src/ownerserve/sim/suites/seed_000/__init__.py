"""This package has the experiments on seed 000's claims."""
