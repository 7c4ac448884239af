"""Families whose layers all attend: full, windowed, latent, sparse or compressed; one file each."""
