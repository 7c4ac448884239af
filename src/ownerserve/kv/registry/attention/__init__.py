"""These families have layers that all attend: full, windowed, latent, sparse or compressed; one
file each.
"""
