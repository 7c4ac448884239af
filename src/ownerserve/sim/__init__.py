"""The simulator runs production decisions on a heap clock, with modelled engines and media."""
