"""The gateway's runtime: sockets in, RouterState's decisions, sockets out. Bytes go through.

| module or folder | owns |
|---|---|
| http | connections and messages: client, upstream, requests, answers, heads, replies |
| workers | what is asked of each worker beside its turns: probes, inventories, places, releases |
| finder | look-ups of sessions' owners in the directory |
| asking | who asks, read from a request before any decision |
| exchange | one request's life, from Arrive to its receipt's end |
| service | all of the above for one gateway: listeners, drain |
| observe, metrics, admin | what it did: counters, decisions, the admin port |
"""
