"""An exchange is one request's life in the gateway, from its arrival to its answer's end, as
phases."""
