"""Which state lies where, as the router was told: a dated copy of what workers and directory know.

Owns no truth. Each entry is one extent, (prefix, [0, tokens), holder), never one a block. Losing
one costs a cache hit; believing a wrong one costs a cache hit too, since the worker has the word.

    a worker's copy is good while    device, host   its life is the one in which it was told
                                     disk           its worker is up: a later life re-adopts it
    the shared store's copy          always
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.messages import Tier
from ownerserve.router.worker import Worker

COPIES_MAX = 8
"""Copies remembered of one prefix; the one told longest ago is forgotten first."""


CLEAN_MIN = 1024
"""An index of fewer names than this is not worth cleaning."""


class Copy(msgspec.Struct, frozen=True, gc=False):
    """Tokens [0, tokens) lie in `tier` of `worker`; None: in the store that all workers share."""

    worker: Worker | None
    life: int
    tier: Tier
    tokens: int

    def is_good(self) -> bool:
        """Whether it can be used now (invariant 6: what is resident decides, nothing else)."""
        worker = self.worker
        if worker is None:
            return True
        return worker.up and (self.life == worker.life or self.tier is Tier.DISK)


class Prefix:
    """A chain of tokens and who holds it. Shared by all sessions that stand on it (forks).

    `refs` sessions stand on it. One alone may grow it; with more, the session that goes on gets a
    prefix of its own and this one stays as it is: copy-on-write (seed 000 §3.6.6, rules 1 and 3).
    """

    __slots__ = ("copies", "hash", "refs", "spec_digest", "tokens")

    def __init__(self, tokens: int = 0) -> None:
        self.tokens = tokens
        self.copies: tuple[Copy, ...] = ()
        self.hash: PrefixHash | None = None
        self.refs = 1
        self.spec_digest = ""
        """Of the workers that hold it; state under another digest is another state."""

    def grow(self, worker: Worker, tokens: int) -> None:
        """A turn has left [0, tokens) on the device of `worker`."""
        digest = worker.profile.spec_digest
        if tokens < self.tokens or digest != self.spec_digest:
            self.copies = ()  # an edited history, or another numerics: others hold other state
            self.spec_digest = digest
        self.tokens = tokens
        self.hold(worker, Tier.DEVICE, tokens)

    def hold(self, worker: Worker | None, tier: Tier, tokens: int) -> None:
        """`worker` holds [0, tokens) in `tier`; what was known of the same place is replaced."""
        copy = Copy(worker, 0 if worker is None else worker.life, tier, tokens)
        copies = self.copies
        if copies and (
            len(copies) > 1 or copies[0].worker is not worker or copies[0].tier is not tier
        ):
            self.drop(worker, tier)
            self.copies = (copy, *self.copies[: COPIES_MAX - 1])
        else:
            self.copies = (copy,)  # as for most: nobody else holds it
        if tokens > self.tokens:
            self.tokens = tokens

    def drop(self, worker: Worker | None, tier: Tier) -> None:
        """The copy in that place is gone."""
        self.copies = tuple(
            [copy for copy in self.copies if copy.worker is not worker or copy.tier is not tier]
        )


class PrefixIndex:
    """Prefixes by their hash, as long as some session stands on them.

    Those that nobody stands on any more are let go when they may be half of all: a turn names its
    prefix anew, and a dictionary of weak references would cost it more than all else here.
    """

    def __init__(self) -> None:
        self._by_hash: dict[PrefixHash, Prefix] = {}
        self._clean_at = CLEAN_MIN

    def __len__(self) -> int:
        return len(self._by_hash)

    def get(self, prefix_hash: PrefixHash) -> Prefix | None:
        prefix = self._by_hash.get(prefix_hash)
        return prefix if prefix is not None and prefix.refs > 0 else None

    def name(self, prefix: Prefix, prefix_hash: PrefixHash) -> None:
        """`prefix` ends in `prefix_hash` now."""
        by_hash = self._by_hash
        former = prefix.hash
        if former is not None and by_hash.get(former) is prefix:
            del by_hash[former]
        prefix.hash = prefix_hash
        by_hash[prefix_hash] = prefix
        if len(by_hash) >= self._clean_at:
            self._by_hash = {name: one for name, one in by_hash.items() if one.refs > 0}
            self._clean_at = max(CLEAN_MIN, 2 * len(self._by_hash))
