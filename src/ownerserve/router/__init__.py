"""Where each turn runs: decisions without I/O, for the gateway and the simulator alike.

| module or folder | owns |
|---|---|
| messages | what RouterState is told, and what it answers |
| state, account | live dispatches and their receipts; the account of all requests |
| decision, policies, pricing | what a policy is asked and answers; the policies; options, priced |
| fleet, worker | who is there, in order of load; a worker's profile and its load |
| sessions, knowledge, residents | the dated copy: sessions and prefixes, what is told of them |
| admission | how many sessions may run at once, and which wait for a seat |
| entry | the queue before the fleet: whose turn is next, deadlines, how many run; rate limits |
| requests | who asks, read from headers and bodies |
| settings | every number a decision depends on, and where it comes from |
"""
