"""Names of things are types: a session id can't be passed where a worker id belongs."""

from __future__ import annotations

from typing import NewType

SessionId = NewType("SessionId", str)
"""An agent's run, scoped to its tenant."""

TurnId = NewType("TurnId", str)
"""One request of a session; unique in the life of a worker."""

WorkerId = NewType("WorkerId", str)
"""An engine process."""

Incarnation = NewType("Incarnation", int)
"""One life of a worker; grows with every start, unless its host's clock is set back."""

INCARNATION_MAX = 1 << 62
"""Nanoseconds since 1970 reach it in 2116: a later life is a fault of who says it."""

PrefixHash = NewType("PrefixHash", bytes)
"""32 bytes: the chained digest of all tokens up to a block boundary (kv.prefix)."""
