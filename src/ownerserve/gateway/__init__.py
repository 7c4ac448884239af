"""The gateway's runtime moves bytes between clients and workers by RouterState's decisions.

| module or folder | owns |
|---|---|
| http | connections and messages: client, upstream, heads, replies, small questions |
| workers | what is asked of each worker beside its turns: probes, inventories, places, releases |
| asking | who asks, read from a request before any decision; look-ups of owners in the directory |
| stamps | what heads say of a turn between gateway and worker |
| receipts | what they say of a decision to the client |
| tenants | the file of who is let in, and on which terms |
| entry | limits and the queue before the fleet, as clients meet them |
| logs | the log: workers, directory, turns |
| exchange | one request's life as phases |
| turns | what an exchange asks at each step: the router's state, admission, places; counters |
| discovery | where workers are found: a name of DNS, a service of Kubernetes |
| roster | which workers there are: who joins, leaves, gets no new turn |
| service | the process: listener, clients, drain |
| checking | what a gateway would find, before it starts |
| metrics, admin | what it did, for people: Prometheus families, the admin port |
| admin_api | the table of its endpoints, the types of their answers, their description |
| tracing | the trace that a turn is part of |
| worker_admin | the admin port's routes to the roster |
"""
