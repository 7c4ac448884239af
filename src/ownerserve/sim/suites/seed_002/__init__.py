"""Experiments on seed 002's claims."""
