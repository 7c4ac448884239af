"""Experiments on seed 003's claims."""
