"""Control decides what is lent, asked for, read, and when it counts. Pure."""
