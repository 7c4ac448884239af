"""The router's books against what they were made from: for tests and `check()`, never hot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ownerserve.kv.errors import InvariantViolated
from ownerserve.router.fleet import Fleet
from ownerserve.router.sessions import SessionTable
from ownerserve.router.worker import Load, Worker


def audit(fleet: Fleet, sessions: SessionTable, loads: Sequence[tuple[Worker, Load]]) -> None:
    """Raise InvariantViolated unless ledgers, bindings, references and orders agree."""
    bound = Counter(
        session.owner
        for _, session in sessions.items()
        if session.owner is not None and session.owner.life == session.owner_life
    )
    for worker in fleet:
        own = [load for where, load in loads if where is worker]
        expected = (
            len(own),
            sum(load.prefill_tokens for load in own),
            sum(load.held_tokens for load in own),
            bound[worker],
        )
        counted = (
            worker.requests,
            worker.pending_prefill_tokens,
            worker.held_tokens,
            worker.bound_sessions,
        )
        if counted != expected:
            raise InvariantViolated(f"invariant 5: {worker.id} has {counted}, not {expected}")
    _check_references(sessions)
    fleet.check()


def _check_references(sessions: SessionTable) -> None:
    """Copy-on-write rests on knowing how many stand on a prefix."""
    standing = [prefix for _, session in sessions.items()
                for prefix in (session.prefix, session.stem) if prefix is not None]  # fmt: skip
    counted = Counter(map(id, standing))
    for prefix in standing:
        if prefix.refs != counted[id(prefix)]:
            raise InvariantViolated(
                f"invariant 5: {counted[id(prefix)]} sessions stand on a prefix that counts "
                f"{prefix.refs}"
            )
