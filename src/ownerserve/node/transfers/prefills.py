"""Prefills are the prompts that a node computes for other workers, from their order to the end of
their lend.

    accepted ── its turn: began, computed ... ──> over           read under one ticket, before or
        │             │                             │            after the turn is over
        └─────────────┴── given up: the turn is aborted, and what it added here goes first

Given up is what nobody asked to read for `UNASKED_S`, what was called off, and what its reader has
done with, in whatever way: all that was for that reader alone. Nothing is sampled, no session is
bound, and no soft reference is left: what it added goes before all else when room is short, or at
once (`Given`).

A prompt is ordered by who reads it, or also by a leg of the gateway's, which is here before that
one has asked. Both say the leg's number, and whoever comes second is told of the same prompt.

All calls are made on the engine's thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, PrefixSalt, unpack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    NO_NONCE,
    Accepted,
    EndPrefill,
    Nonce,
    Prefill,
    Reject,
    Released,
    RpcAnswer,
)
from ownerserve.node.transfers.lending import ONE_TOKEN
from ownerserve.node.transfers.turn_lends import ComingPrompt, TurnLends
from ownerserve.node.vocabulary.chains import PromptPrefix, prefix_of

UNASKED_S = 30.0
"""A prompt that nobody asks to read is kept so long."""


class AfterRead(StrEnum):
    """An `AfterRead` says what becomes of a prompt's blocks here, once who read them has done."""

    KEEP = "keep"
    """They go before all else when room is short: until then the next prompt may begin with
    them."""
    FREE = "free"
    """They are free at once."""


PromptOver = Callable[[int], None]
"""Hears how many tokens of a prompt are computed, once nothing is added to it."""


class OrderedPrompt(msgspec.Struct, frozen=True, eq=False):
    """An `OrderedPrompt` is what an engine is to compute: the whole blocks of `prefix`, which begin
    a prompt of `whole_tokens` tokens. `source` holds more of them, of the session `lent_as`."""

    prefix: PromptPrefix
    whole_tokens: int
    cache_salt: str
    source: LenderAddress | None
    lent_as: SessionId | None


class PrefillTimes(NamedTuple):
    """`PrefillTimes` are what a prompt takes, in ms: until all that stands before it is computed,
    and by itself."""

    wait_ms: float
    compute_ms: float


class PrefillEngine(Protocol):
    """A `PrefillEngine` computes prompts without an answer."""

    def begin_prefill(self, ordered: OrderedPrompt) -> TurnId | WorkerRefusal:
        """Queue the prompt, and return the turn that computes it; or why not."""
        ...

    def abort_prefill(self, turn_id: TurnId) -> None:
        """Give the turn up, wherever it is; one that has ended is no error."""
        ...

    def prefill_ms(self, tokens: int, known: int) -> PrefillTimes:
        """Return what computing so many tokens behind `known` ones takes here."""
        ...


NOTHING = PrefillTimes(0.0, 0.0)


class _OpenLeg(NamedTuple):
    asked: Prefill
    accepted: Accepted


class NoPrefills:
    """`NoPrefills` serves an engine that computes for nobody else."""

    def began(self, turn_id: TurnId, sealed_tokens: int) -> None: ...

    def computed(self, turn_id: TurnId, tokens: int) -> None: ...

    def over(self, turn_id: TurnId) -> None: ...

    def poll(self, now: float) -> None: ...

    def next_due(self) -> float:
        return inf


class Prefills:
    """`Prefills` owns the prompts that its engine computes for others. `counts` says what came of
    them, `told_bytes` how much was told after a layer, and after a step: metric labels.
    `after_read`: what becomes of what such a prompt added."""

    def __init__(self, cache: HeteroCache, turns: TurnLends, engine: PrefillEngine) -> None:
        self.counts: Counter[str] = Counter()
        self.told_bytes = turns.told_bytes
        self.after_read = AfterRead.KEEP
        self._turns = turns
        self._engine = engine
        self._cache = cache
        self._held = 0
        self._block = cache.layout.block_tokens
        self._unasked_until_s: dict[TurnId, float] = {}  # oldest first
        self._legs: dict[Nonce, _OpenLeg] = {}
        self._over: dict[TurnId, PromptOver] = {}

    # -- what peers ask ------------------------------------------------------------------------

    def answer(self, asked: Prefill | EndPrefill) -> RpcAnswer:
        """Do what a peer asks, at the time that it is."""
        if isinstance(asked, EndPrefill):
            self._give_up(asked.turn_id, "called_off")
            return Released()
        return self.accept(asked, time.monotonic())

    def accept(self, asked: Prefill, now: float) -> Accepted | Reject:
        """Begin to compute what is asked, or say why not."""
        count, rest = divmod(len(asked.tokens), TOKEN_BYTES)
        end = max(0, count - 1) // self._block * self._block
        if rest or not end:
            return self._reject(WorkerRefusal.MALFORMED)
        before = self.joined(asked)
        if before is not None:
            return before
        ids = unpack(asked.tokens[: end * TOKEN_BYTES])
        prefix = prefix_of(ids, self._block, PrefixSalt(asked.cache_salt))
        tip = prefix.tip
        assert tip is not None
        is_here = self._is_here(prefix)
        resident = self._cache.match(prefix.tokens).range_tokens
        known = max(resident, min(asked.source_tokens, end))
        takes = NOTHING if is_here else self._engine.prefill_ms(end - known, known)
        begun = self._begun(asked, prefix, count) if not is_here else self._no_turn()
        if isinstance(begun, WorkerRefusal):
            return self._reject(begun)
        digests = prefix.hashed.digests[: prefix.blocks]
        coming = ComingPrompt(begun, prefix.tokens, digests, is_over=is_here)
        coming.found = resident // self._block
        coming.sealed = len(digests) if is_here else 0
        self._turns.add(coming)
        self._unasked_until_s[begun] = now + UNASKED_S
        self.counts["accepted"] += 1
        accepted = Accepted(begun, end, tip, sum(takes), takes.compute_ms)
        if asked.leg != NO_NONCE:
            self._legs[asked.leg] = _OpenLeg(asked, accepted)
        return accepted

    def joined(self, asked: Prefill) -> Accepted | None:
        """Return what was said when this very prompt was asked for under its leg's number; None: it
        was not. Any thread may call: whoever comes second does not wait for the step that computes
        the prompt."""
        leg = self._legs.get(asked.leg)
        if leg is None:
            return None
        size = leg.accepted.tokens * TOKEN_BYTES
        rest = len(asked.tokens) - size
        is_same = (
            0 < rest <= self._block * TOKEN_BYTES
            and asked.cache_salt == leg.asked.cache_salt
            and asked.tokens[:size] == leg.asked.tokens[:size]
        )
        if not is_same:
            return None
        self.counts["joined"] += 1
        return leg.accepted

    def begin_leg(self, asked: Prefill, over: PromptOver) -> Accepted | Reject:
        """Begin to compute what a gateway's leg asks for, or join what was begun; `over` is called
        as soon as nothing is added to it, which may be before this returns."""
        accepted = self.accept(asked, time.monotonic())
        if isinstance(accepted, Accepted):
            self._over[accepted.turn_id] = over
            prompt = self._turns.of(accepted.turn_id)
            if prompt is not None and prompt.is_over:
                self._tell_over(prompt)
        return accepted

    def end_leg(self, leg: Nonce) -> None:
        """Give up what the leg of that number asked for: its turn is over, or goes on without it.
        One that is over is no error."""
        open_leg = self._legs.get(leg)
        if open_leg is not None:
            self._give_up(open_leg.accepted.turn_id, "called_off")

    def _is_here(self, prefix: PromptPrefix) -> bool:
        """Tell whether all of it is resident, with the point to go on from at its end."""
        match = self._cache.match(prefix.tokens + ONE_TOKEN)  # a match leaves the last token out
        if not self._cache.layout.point_names:
            return match.range_tokens >= prefix.count
        return any(one.position == prefix.count and not one.lacks for one in match.points)

    def _begun(self, asked: Prefill, prefix: PromptPrefix, count: int) -> TurnId | WorkerRefusal:
        ordered = OrderedPrompt(prefix, count, asked.cache_salt, asked.source, asked.session_id)
        return self._engine.begin_prefill(ordered)

    def _no_turn(self) -> TurnId:
        """Return the name of a turn that has nothing to compute."""
        self._held += 1
        return TurnId(f"held-{self._held}")

    def lend_ended(self, ticket: int) -> None:
        """Note that who read under the ticket is done, or was lost."""
        turn_id = self._turns.read_under(ticket)
        if turn_id is not None:
            prompt = self._turns.of(turn_id)
            is_whole = prompt is not None and prompt.is_over
            self._give_up(turn_id, "read" if is_whole else "left")

    # -- the engine's turns --------------------------------------------------------------------

    def began(self, turn_id: TurnId, sealed_tokens: int) -> None:
        """Note that a turn has begun, or begins again, with so many tokens of its prompt at hand;
        one that is no prefill is no error here and below."""
        if self._turns.of(turn_id) is not None:
            self._turns.began(turn_id, sealed_tokens)

    def computed(self, turn_id: TurnId, tokens: int) -> None:
        """Note that the first `tokens` of a turn's prompt are computed, and what is kept of it is
        in its slots."""
        if self._turns.of(turn_id) is not None:
            self._turns.computed(turn_id, tokens)

    def over(self, turn_id: TurnId) -> None:
        """Note that a turn has ended, as it should or not."""
        prompt = self._turns.of(turn_id)
        if prompt is not None:
            self._turns.over(turn_id)
            self._tell_over(prompt)

    def poll(self, now: float) -> None:
        """Give up what nobody asked to read in time."""
        for turn_id, until_s in list(self._unasked_until_s.items()):
            prompt = self._turns.of(turn_id)
            if prompt is None or prompt.ticket:
                del self._unasked_until_s[turn_id]
            elif until_s <= now:
                self._give_up(turn_id, "unasked")

    def next_due(self) -> float:
        """Return the instant at which `poll` has something to do; inf: none."""
        return min(self._unasked_until_s.values(), default=inf)

    # -- parts ---------------------------------------------------------------------------------

    def _reject(self, reason: WorkerRefusal) -> Reject:
        self.counts[reason.value] += 1
        return Reject(reason)

    def _give_up(self, turn_id: TurnId, end: str) -> None:
        self._unasked_until_s.pop(turn_id, None)
        prompt = self._turns.remove(turn_id)
        if prompt is None:
            return
        self.counts[end] += 1
        for leg in [leg for leg, of in self._legs.items() if of.accepted.turn_id == turn_id]:
            del self._legs[leg]
        self._tell_over(prompt)
        if not prompt.is_over:
            self._engine.abort_prefill(turn_id)
        self._let_go(prompt)

    def _let_go(self, prompt: ComingPrompt) -> None:
        """Have what the prompt added to the cache go first, or at once: its reader has it."""
        leftovers = self._cache.leftovers
        blocks = leftovers.let_go(prompt.tokens, behind=prompt.found)
        if self.after_read is AfterRead.FREE and blocks:
            leftovers.free(blocks)

    def _tell_over(self, prompt: ComingPrompt) -> None:
        over = self._over.pop(prompt.turn_id, None)
        if over is not None:
            over(prompt.sealed * self._block)
