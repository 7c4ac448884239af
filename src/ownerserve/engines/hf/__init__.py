"""The reference engine runs transformers' own models over our paged state pools. This module
imports nothing."""
