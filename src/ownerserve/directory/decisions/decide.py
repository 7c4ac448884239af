"""decide(): which decision a request asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ownerserve.directory import messages as ask
from ownerserve.directory.decisions import holders, prefixes, sessions
from ownerserve.directory.decisions.records import Records
from ownerserve.directory.decisions.transaction import Moment, Transaction
from ownerserve.kv.epoch import Epoch

Decider = Callable[[Records, Any, Moment], Transaction]

DECIDERS: dict[type, Decider] = {
    ask.Register: holders.register,
    ask.RenewLease: holders.renew_lease,
    ask.Retire: holders.retire,
    ask.Publish: holders.publish,
    ask.Bind: sessions.bind,
    ask.Transfer: sessions.transfer,
    ask.Advance: sessions.advance,
    ask.EndSession: sessions.end_session,
    ask.FindSession: sessions.find_session,
    ask.Drop: prefixes.drop,
    ask.Lookup: prefixes.lookup,
    ask.FindGroup: prefixes.find_group,
    ask.ReplicateReadonly: prefixes.replicate_readonly,
}


def decide(records: Records, request: ask.Request, moment: Moment) -> Transaction:
    """The answer to `request` and what to write for it. Reads nothing but its arguments."""
    return DECIDERS[type(request)](records, request, moment)


def seen_of(request: ask.Request) -> Epoch | None:
    """The highest epoch that the sender knows, where the request carries it."""
    return getattr(request, "seen", None)
