"""The owner's side is what one life of a routing unit owns, asks for, and refuses others. Pure."""
