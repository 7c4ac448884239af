"""State between simulated workers: production's control and lends over a modelled network."""
