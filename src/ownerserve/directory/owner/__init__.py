"""The owner's side: what one life of a routing unit owns, asks for, and refuses others. Pure."""
