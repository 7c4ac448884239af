"""Experiments on seed 001's claims."""
