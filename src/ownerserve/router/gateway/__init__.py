"""The gateway's runtime: sockets in, RouterState's decisions, sockets out. Bytes go through.

| module | owns |
|---|---|
| heads | which header lines are passed on |
| replies | answers of the gateway's own |
| requests, answers | where messages begin and end in a client's and a worker's bytes |
| client | one client connection: one request answered at a time |
| exchange | one request's life, from Arrive to its receipt's end |
| upstream | one connection to a worker |
| pool | the connections to each worker |
| health | who is up |
| service | all of the above for one gateway: listeners, drain |
| observe, admin | what it did: counters, decisions, the admin port |
"""
