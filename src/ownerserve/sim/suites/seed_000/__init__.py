"""Experiments on seed 000's claims."""
