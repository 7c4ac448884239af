"""The reference engine: transformers' own models over our paged state pools. Imports nothing."""
