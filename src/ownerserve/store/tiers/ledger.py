"""The ledger is the account of a tier's room: who holds how much, and what must go for more.

Open reservations count. The ledger does no I/O of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ownerserve.store.format.model import ArtifactKind, Listed, Meta, RefusalReason, TierUsage
from ownerserve.store.tiers.backend import Reservation
from ownerserve.store.tiers.policy import Need, Order, Taken, TierLimits, choose, shortfall

Oldest = Callable[[ArtifactKind, int, bytes | None], Sequence[Listed]]
"""(kind, limit, tenant or None) -> least recently touched records."""

_FIRST_WINDOW, _LAST_WINDOW = 64, 1 << 20


class Ledger:
    """A ledger holds the open reservations of one tier, and makes room by its limits.

    `standing` is read, not owned: what the tier's own catalogue says is there.
    """

    def __init__(
        self, limits: TierLimits, standing: Mapping[tuple[bytes, ArtifactKind], TierUsage]
    ) -> None:
        self.limits = limits
        self._standing = standing
        self._open: dict[bytes, Reservation] = {}
        self._reserved: Counter[tuple[bytes, ArtifactKind]] = Counter()

    @property
    def reserved_bytes(self) -> int:
        """Count the bytes that open reservations hold."""
        return self._reserved.total()

    def is_held(self, id_: bytes) -> bool:
        """Tell whether an open reservation stands for this artifact."""
        return id_ in self._open

    def hold(self, reservation: Reservation) -> None:
        """Count a reservation until `release`."""
        meta = reservation.meta
        self._open[meta.id] = reservation
        self._reserved[meta.tenant, meta.kind] += reservation.stored_bytes

    def release(self, reservation: Reservation) -> None:
        """Stop counting a reservation that was committed or aborted."""
        meta = reservation.meta
        if self._open.pop(meta.id, None) is not None:
            self._reserved[meta.tenant, meta.kind] -= reservation.stored_bytes

    def _taken(self, tenant: bytes, kind: ArtifactKind) -> Taken:
        """Return what is standing and reserved, as a need of `tenant` and `kind` sees it."""
        own_kind = own = of_kind = 0
        amounts = [(key, used.stored_bytes) for key, used in self._standing.items()]
        amounts += self._reserved.items()
        for (owner, its_kind), count in amounts:
            if its_kind is kind:
                of_kind += count
            if owner == tenant:
                own += count
                own_kind += count if its_kind is kind else 0
        return Taken(of_kind, own, own_kind)

    def make_room(
        self, meta: Meta, stored_bytes: int, *, oldest: Oldest, order: Order
    ) -> Sequence[Listed] | RefusalReason:
        """Return the records to evict so that `stored_bytes` fit; a refusal when nothing can be
        done.
        """
        need = Need(meta.tenant, meta.kind, stored_bytes)
        short = shortfall(need, self._taken(meta.tenant, meta.kind), self.limits)
        if isinstance(short, RefusalReason):
            return short
        victims: list[Listed] = []
        if short.tenant_bytes:
            own = self._choose(need, short.tenant_bytes, meta.tenant, oldest=oldest, order=order)
            if not own:
                return RefusalReason.QUOTA
            victims += own
        rest = short.kind_bytes
        if victims:
            rest -= sum(victim.stored_bytes for victim in victims)
        if rest > 0:
            gone = frozenset(victim.meta.id for victim in victims)
            others = self._choose(need, rest, None, oldest=oldest, order=order, pinned=gone)
            if not others:
                return RefusalReason.NO_SPACE
            victims += others
        return victims

    def _choose(
        self,
        need: Need,
        need_bytes: int,
        tenant: bytes | None,
        *,
        oldest: Oldest,
        order: Order,
        pinned: frozenset[bytes] = frozenset(),
    ) -> Sequence[Listed]:
        window = _FIRST_WINDOW
        while True:
            candidates = oldest(need.kind, window, tenant)
            victims = choose(candidates, need_bytes, order=order, pinned=pinned)
            if victims or len(candidates) < window or window >= _LAST_WINDOW:
                return victims
            window *= 4
