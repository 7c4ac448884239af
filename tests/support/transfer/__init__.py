"""A process that lends, roads to it, and the contract that every mover keeps."""
