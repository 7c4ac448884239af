"""Where each turn runs: decision code, and the gateway that carries it out."""
