"""Transfer moves sealed state between processes: layouts, control, movers. It knows artifact ids,
the canonical frame and tickets; never a session, an epoch or an engine's name.

Receivers pull: a process's memory is written by that process only.
"""
