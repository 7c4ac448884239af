"""These records cross between processes, one file each: they are encoded and decoded here only."""
