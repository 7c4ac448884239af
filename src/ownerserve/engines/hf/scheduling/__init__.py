"""This folder decides which sequences compute which tokens in the next step, and defines the
requests they come from. Pure."""
