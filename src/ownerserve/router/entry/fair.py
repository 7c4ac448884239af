"""A fair line says who is next of those that wait: by weight over tenants, then over each tenant's
classes, in the order of arrival within a class.

It is start-time fair queueing (Goyal, Vin, Cheng 1996) at both levels, by estimated tokens. A flow
(a tenant, or a class within one) has a tag: what it was given so far over its weight, in the line's
virtual time. Who waits with the least tag is next, and virtual time is that tag. A flow that begins
to wait, or is let in without waiting, has at least the virtual time: nobody saves up for later, and
nobody pays for what was taken while there was enough for all.

    A, weight 2   tag 0 ──1000 tokens──> 500 ──1000──> 1000           served A B A A B ...
    B, weight 1   tag 0 ──1000 tokens──────────> 1000

While two flows wait, what they were given over their weights never differs by more than the longest
turn of each over its weight, however fast or slow the fleet is just then: deficit round robin
promises that only for a quantum as long as the longest turn, and agents' turns lie between 100 and
200,000 tokens, which would let one tenant's small turns stand behind 200,000 tokens of another.

Owns the order and the tags, nothing else. Pure. A choice costs a look at each tenant that waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, nlargest
from itertools import takewhile
from typing import NewType, TypeVar

import msgspec

from ownerserve.router.entry.terms import EnteringTurn, LinePlace, SessionClass

Ticket = NewType("Ticket", int)
FLOWS_MIN = 1024
"""Fewer tenants than this are not worth forgetting."""
IDLE_MAX = FLOWS_MIN // 2
"""So many who do not wait are remembered at most, by what they took: without a tenants file each
new key is a tenant."""


class InLine(msgspec.Struct, frozen=True, gc=False):
    """One in line is a turn, and the number that it drew: the lower came earlier."""

    ticket: Ticket
    turn: EnteringTurn


class _Flow:
    """A flow of one class. `tag`: the start tag of who is next; of equal ones the larger share's
    goes first."""

    __slots__ = ("share", "tag", "turns")

    def __init__(self) -> None:
        self.tag = 0.0
        self.share = 1.0
        self.turns: OrderedDict[Ticket, InLine] = OrderedDict()

    def first(self) -> Ticket:
        return next(iter(self.turns))

    def is_waiting(self) -> bool:
        return bool(self.turns)


class _Tenant:
    """A tenant's flow, of the flows of its classes. `waiting`: over all of them."""

    __slots__ = ("classes", "tag", "virtual", "waiting", "weight")

    def __init__(self) -> None:
        self.tag = self.virtual = 0.0
        self.waiting = 0
        self.weight = 1.0
        self.classes: dict[SessionClass, _Flow] = {}

    def next_class(self) -> _Flow:
        waiting = (flow for flow in self.classes.values() if flow.turns)
        return min(waiting, key=lambda flow: (flow.tag, -flow.share, flow.first()))

    def first(self) -> Ticket:
        return self.next_class().first()

    def is_waiting(self) -> bool:
        return self.waiting > 0

    def in_order(self) -> Iterator[InLine]:
        """Yield the tenant's turns in the order in which they would be served one by one."""
        heap = [
            (flow.tag, -flow.share, flow.first(), list(flow.turns.values()), 0)
            for flow in self.classes.values()
            if flow.turns
        ]
        heapify(heap)
        while heap:
            tag, share, _, ones, at = heappop(heap)
            one = ones[at]
            yield one
            if at + 1 < len(ones):
                tag -= one.turn.cost_tokens / share
                heappush(heap, (tag, share, ones[at + 1].ticket, ones, at + 1))


class FairLine:
    """The line holds turns; `add` and `pop` tell it who waits, and `charge` who went by."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[str, _Tenant] = {}
        """Tenants of whom a turn is in line."""
        self._at: dict[Ticket, InLine] = {}
        self._virtual = 0.0
        self._clean_at = FLOWS_MIN

    def __len__(self) -> int:
        return len(self._at)

    def add(self, one: InLine) -> None:
        """Put one into its tenant's class: at the end, or where its ticket stood before."""
        turn = one.turn
        tenant, flow = self._flows(turn)
        if not tenant.waiting:
            tenant.tag = max(tenant.tag, self._virtual)
            self._waiting[turn.tenant] = tenant
        if not flow.turns:
            flow.tag = max(flow.tag, tenant.virtual)
        tenant.waiting += 1
        is_back = bool(flow.turns) and next(reversed(flow.turns)) > one.ticket
        flow.turns[one.ticket] = one
        if is_back:
            flow.turns = OrderedDict(sorted(flow.turns.items()))
        self._at[one.ticket] = one

    def first(self) -> InLine:
        """Return who is next; the line is not empty."""
        waiting = self._waiting.values()
        tenant = min(waiting, key=lambda tenant: (tenant.tag, tenant.first()))
        return next(iter(tenant.next_class().turns.values()))

    def in_order(self) -> Iterator[InLine]:
        """Yield all in the order in which they would be let in one by one; the line may change
        meanwhile, and what is yielded does not follow."""
        heap = []
        for tenant in self._waiting.values():
            ones = tenant.in_order()
            one = next(ones)
            heap.append((tenant.tag, one.ticket, one, ones))
        heapify(heap)
        while heap:
            tag, _, one, ones = heappop(heap)
            following = next(ones, None)
            if following is not None:
                tag += one.turn.cost_tokens / one.turn.terms.weight
                heappush(heap, (tag, following.ticket, following, ones))
            yield one

    def pop(self, ticket: Ticket) -> InLine:
        """Take one out who is let in, and count what it takes."""
        one = self.leave(ticket)
        assert one is not None
        self.charge(one.turn)
        return one

    def charge(self, turn: EnteringTurn) -> None:
        """Count what a turn takes that is let in, whether or not it stood in line."""
        tenant, flow = self._flows(turn)
        cost = turn.cost_tokens
        self._virtual = _charge(
            tenant, self._virtual, self._waiting.values(), cost=cost / tenant.weight
        )
        tenant.virtual = _charge(
            flow, tenant.virtual, tenant.classes.values(), cost=cost / flow.share
        )

    def leave(self, ticket: Ticket) -> InLine | None:
        """Take one out who is not let in; None: nobody has that ticket."""
        one = self._at.pop(ticket, None)
        if one is not None:
            tenant, flow = self._flows(one.turn)
            del flow.turns[ticket]
            tenant.waiting -= 1
            if not tenant.waiting:
                del self._waiting[one.turn.tenant]
        return one

    def place(self, ticket: Ticket) -> LinePlace:
        """Return where one stands who waits: as if all were let in one by one from now on."""
        tenant, flow = self._flows(self._at[ticket].turn)
        is_only = len(flow.turns) == tenant.waiting == len(self._at)
        if is_only and next(reversed(flow.turns)) == ticket:  # whoever comes, where it is one line
            return LinePlace(len(self), len(self))
        ahead = takewhile(lambda one: one.ticket != ticket, self.in_order())
        return LinePlace(sum(1 for _ in ahead) + 1, len(self))

    def places(self) -> dict[Ticket, LinePlace]:
        """Return where each stands who waits, the first of them first."""
        return {one.ticket: LinePlace(at, len(self)) for at, one in enumerate(self.in_order(), 1)}

    def ahead(self, turn: EnteringTurn) -> int:
        """Estimate how many of those in line go before `turn`, were it added now: as many as the
        shares of its tenant and its class bring until those of its own before it are through."""
        weight, priorities, own = turn.terms.weight, turn.terms.priorities, turn.session_class
        others, share, mine = 0.0, 1.0, 0
        for name, tenant in self._waiting.items():
            if name != turn.tenant:
                others += tenant.weight
                continue
            classes = {own} | {one for one, flow in tenant.classes.items() if flow.turns}
            share = priorities.of(own) / sum(map(priorities.of, classes))
            mine = len(tenant.classes[own].turns) if own in tenant.classes else 0
        share *= weight / (weight + others)
        return min(len(self._at), int((mine + 1) / share) - 1)

    def _flows(self, turn: EnteringTurn) -> tuple[_Tenant, _Flow]:
        tenant = self._tenants.get(turn.tenant)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[turn.tenant] = _Tenant()
        tenant.weight = turn.terms.weight
        flow = tenant.classes.get(turn.session_class)
        if flow is None:
            flow = tenant.classes[turn.session_class] = _Flow()
        flow.share = turn.terms.priorities.of(turn.session_class)
        return tenant, flow

    def _forget_idle(self) -> None:
        """Forget tenants that would begin anew all the same, when they may be half of all; of
        others who do not wait, those that took least."""
        if len(self._tenants) >= self._clean_at:
            idle = (
                (one.tag, name)
                for name, one in self._tenants.items()
                if not one.waiting and one.tag > self._virtual
            )
            kept = {name for _, name in nlargest(IDLE_MAX, idle)}
            self._tenants = {
                name: one for name, one in self._tenants.items() if one.waiting or name in kept
            }
            self._clean_at = max(FLOWS_MIN, 2 * len(self._tenants))


_AnyFlow = TypeVar("_AnyFlow", _Flow, _Tenant)


def _charge(flow: _AnyFlow, virtual: float, flows: Iterable[_AnyFlow], *, cost: float) -> float:
    """Move a flow's tag on by `cost`, and return the virtual time of all `flows` after that."""
    start = max(flow.tag, virtual)
    flow.tag = start + cost
    least = min((one.tag for one in flows if one.is_waiting() and one is not flow), default=start)
    return max(virtual, min(start, least))
