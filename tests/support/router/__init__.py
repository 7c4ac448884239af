"""Fleets and answers as the router's tests make them."""
