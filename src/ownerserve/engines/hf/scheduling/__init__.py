"""Scheduling: which sequences compute which tokens in the next step, and the requests they come
from. Pure."""
