"""Records that cross between processes, one file each: encoded and decoded here only."""
