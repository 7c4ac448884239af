"""Replay inside an unmodified vLLM: full attention's KV of a prefix is kept, and the windows before
its end are computed anew from the last few tokens of it.

    rules.py       how many tokens that takes, and why it is off
    replays.py     the replays of running requests, and whether the engine can do any
    scheduler.py   vLLM's schedulers that replay (--scheduler-cls), and what they ask of us
    windows.py     vLLM's sliding-window manager that holds the rows of a replay
    padding.py     the worker's part: replayed rows write no KV of full attention
"""
