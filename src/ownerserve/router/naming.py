"""The name of a session: a digest of tenant, model, field and the client's own word for it.

A name is the session's only one, for router, workers, peers and directory: 32 hex digits, whatever
the client wrote. Nobody finds another tenant's session by guessing its id, an id of any length
costs the same, and nothing of a client's text leaves the gateway.

**The model is in the name from the first turn on**, so that a fleet that learns of a second model
renames nobody. Where all workers serve one model it is that one, without a look at the body; where
they serve several, or it is not known what one of them serves, it is the one that the body names.
Both are equal for whoever is served: a worker that serves one model answers no other name. One
exception costs a session its cached state once: a body that names no model, on the day when the
fleet learns of a second one.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.turn_line import NAME_DIGITS

NAMES_KEPT = 16_384
KEPT_ID_MAX = 128
"""Characters. Names of sessions that come again are kept, so long as their ids are short."""


class Scope(msgspec.Struct, frozen=True, gc=False):
    """The tenant and the model of a session: ids are compared within one scope only."""

    tenant: str
    model: str = ""

    def name(self, field: str, *values: str) -> SessionId:
        """The session that a client means by `field` = `values`."""
        make = _kept if sum(map(len, values)) <= KEPT_ID_MAX else _name
        return make(self.tenant, self.model, field, *values)


def _name(*parts: str) -> SessionId:
    text = "".join([f"{len(part)}:{part}" for part in parts])
    data = text.encode("utf-8", "surrogatepass")
    digest = blake2b(data, digest_size=NAME_DIGITS // 2, person=b"ownerserve-name")
    return SessionId(digest.hexdigest())


_kept = lru_cache(NAMES_KEPT)(_name)
