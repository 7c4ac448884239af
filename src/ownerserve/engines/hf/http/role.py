"""A worker's role says to gateways which part of turns it takes. This module owns it: stated with
the status, and flipped while the worker is idle. Pure.

    POST /ownerserve/role {"role": "decode"}
      | nothing runs or waits ─> 200, stated from now on: gateways hear it with their next probe
      `- a turn is here       ─> 409 not_idle: ask again when it has ended

The engine is the same in every role, and serves whatever turn is sent to it: who was decided on
before the flip loses nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.wire.status import ROLES, LoadStatement

_JSON = "application/json"


class AskedRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An `AskedRole` asks for a role."""

    role: Literal["prefill", "decode", "hybrid"]


class RoleFlipped(msgspec.Struct, frozen=True):
    """The worker has this role from now on; `was` is what it had until now."""

    role: str
    was: str


class NotIdle(msgspec.Struct, frozen=True):
    """The worker keeps its role, as so many turns are here."""

    running: int
    waiting: int

    def __str__(self) -> str:
        return (
            f"a worker changes its role while it is idle: {self.running} turns run here and "
            f"{self.waiting} wait; ask again when they have ended"
        )


class StatedRole:
    """The `StatedRole` is what the worker says that it is."""

    def __init__(self, role: str) -> None:
        assert role in ROLES, role
        self.now = role

    def flip(self, asked: AskedRole, load: LoadStatement) -> RoleFlipped | NotIdle:
        """Take the role on, where the load says that no turn is here. The role that it has already
        is taken on at any time."""
        was = self.now
        is_idle = not load.running_sequences and not load.waiting_sequences
        if asked.role != was and not is_idle:
            return NotIdle(load.running_sequences, load.waiting_sequences)
        self.now = asked.role
        return RoleFlipped(asked.role, was)


def read_asked_role(content_type: str, body: bytes) -> AskedRole:
    """Return the role that is asked for. Raises InvalidInput, also for a body of another type: a
    page in a browser may send one without being asked, but not this one."""
    if content_type.partition(";")[0].strip().lower() != _JSON:
        raise InvalidInput("content-type", f"is {content_type!r}", f"send {_JSON}")
    try:
        return msgspec.json.decode(body, type=AskedRole)
    except UNREADABLE as error:
        mend = f'send {{"role": one of {", ".join(ROLES)}}}'
        raise InvalidInput("role", str(error), mend) from error
