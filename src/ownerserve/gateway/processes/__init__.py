"""This package lets one gateway be several processes: who answers which session, how connections
get there, and what keeps the processes running and makes them look like one (docs/processes.md)."""
