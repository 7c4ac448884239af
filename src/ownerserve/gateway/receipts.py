"""A receipt is what an answer's head tells the client of the decision: where its turn ran, why, by
which action, and how much was expected to be cached.

Opaque, as long as nothing else is said: a worker is called by an id that says no address, another
one for each tenant, and nobody is told prices, in which others' load is. Open, to people who may
know the fleet: addresses, what else was priced (ACTION@WORKER=MS, cheapest first), and the worker's
own plan. The admin port has it all by the answer's x-request-id, whatever clients are told.
"""

from __future__ import annotations

import os
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.kv.ids import WorkerId
from ownerserve.kv.messages import PlacementAction
from ownerserve.kv.wire.headers import (
    ACTION_HEADER,
    EXPECTED_CACHED_HEADER,
    PLAN_HEADER,
    PREFIX,
    PRICED_HEADER,
    REASON_HEADER,
    TURN_CLASS_HEADER,
    WORKER_HEADER,
    header_line,
)
from ownerserve.router.decision import DispatchReason, Option, TurnClass
from ownerserve.router.messages import Dispatch

PRICED_MAX = 4
"""Alternatives in the header; the admin port has all of them, with their terms."""
NAMES_KEPT = 4096

_REASON = {reason: header_line(REASON_HEADER, reason) for reason in DispatchReason}
_ACTION = {action: header_line(ACTION_HEADER, action) for action in PlacementAction}
_TURN = {turn: header_line(TURN_CLASS_HEADER, turn) for turn in TurnClass}
_WORKER, _EXPECTED = WORKER_HEADER.encode(), EXPECTED_CACHED_HEADER.encode()
_PLAN_HEADER, _PLAN = PLAN_HEADER.encode(), PLAN_HEADER.removeprefix(PREFIX).encode()


class ReceiptForm(StrEnum):
    """A receipt's form says how much of the fleet clients are told."""

    OPAQUE = "opaque"
    OPEN = "open"


class Receipts(Protocol):
    """Receipts make the header lines of answers."""

    def lines(self, dispatch: Dispatch, head: ResponseHead, *, tenant: str) -> bytes:
        """Return the lines for the client, of whom `tenant` is the name."""
        ...


class OpenReceipts:
    """Open receipts tell addresses and prices."""

    def lines(self, dispatch: Dispatch, head: ResponseHead, *, tenant: str) -> bytes:
        """Return the lines, the same for every tenant."""
        lines = _lines(dispatch, dispatch.worker.encode())
        priced = ", ".join(map(_priced, dispatch.decision.alternatives[:PRICED_MAX]))
        if priced:
            lines += header_line(PRICED_HEADER, priced)
        plan = head.stamp.get(_PLAN)
        return lines if plan is None else lines + b"%b: %b\r\n" % (_PLAN_HEADER, plan)


class OpaqueReceipts:
    """Opaque receipts tell no addresses and no prices. Ids are this process's own: drawn anew at
    its start."""

    def __init__(self) -> None:
        secret = os.urandom(16)

        def name(tenant: str, worker: WorkerId) -> bytes:
            told = f"{len(tenant)}:{tenant}{worker}".encode("utf-8", "surrogatepass")
            return b"w-" + blake2b(told, digest_size=6, key=secret).hexdigest().encode()

        self._name = lru_cache(NAMES_KEPT)(name)

    def lines(self, dispatch: Dispatch, head: ResponseHead, *, tenant: str) -> bytes:
        """Return the lines, with the worker as this tenant knows it."""
        return _lines(dispatch, self._name(tenant, dispatch.worker))


def receipts_of(form: ReceiptForm) -> Receipts:
    """Return the receipts of that form."""
    return OpenReceipts() if form is ReceiptForm.OPEN else OpaqueReceipts()


def _lines(dispatch: Dispatch, worker: bytes) -> bytes:
    decision = dispatch.decision
    return b"%b: %b\r\n%b%b%b%b: %d\r\n" % (
        _WORKER,
        worker,
        _REASON[dispatch.reason],
        _ACTION[decision.action],
        _TURN[dispatch.turn],
        _EXPECTED,
        decision.cached_tokens,
    )


def _priced(option: Option) -> str:
    return f"{option.action.value}@{option.worker.id}={option.total_ms:.1f}"
