"""decide() makes the decision that a request asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ownerserve.directory import messages
from ownerserve.directory.decisions import holders, prefixes, sessions
from ownerserve.directory.decisions.records import Records
from ownerserve.directory.decisions.transaction import Moment, Transaction
from ownerserve.kv.messages import Epoch

Decider = Callable[[Records, Any, Moment], Transaction]

DECIDERS: dict[type, Decider] = {
    messages.Register: holders.register,
    messages.RenewLease: holders.renew_lease,
    messages.Retire: holders.retire,
    messages.Publish: holders.publish,
    messages.Bind: sessions.bind,
    messages.Transfer: sessions.transfer,
    messages.Advance: sessions.advance,
    messages.EndSession: sessions.end_session,
    messages.FindSession: sessions.find_session,
    messages.Drop: prefixes.drop,
    messages.Lookup: prefixes.lookup,
    messages.FindGroup: prefixes.find_group,
    messages.ReplicateReadonly: prefixes.replicate_readonly,
}


def decide(records: Records, request: messages.Request, moment: Moment) -> Transaction:
    """Return the answer to `request` and what to write for it. Reads nothing but its arguments."""
    return DECIDERS[type(request)](records, request, moment)


def seen_of(request: messages.Request) -> Epoch | None:
    """Return the highest epoch that the sender knows, where the request carries it."""
    return getattr(request, "seen", None)
