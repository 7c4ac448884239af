"""Prefills are the prompts that a node computes for other workers, from their order to the end of
their lend.

    accepted ── its turn: began, computed ... ──> over           read under one ticket, before or
        │             │                             │            after the turn is over
        └─────────────┴── given up: the turn is aborted, and what it sealed is ordinary cached state

Given up is what nobody asked to read for `UNASKED_S`, what was called off, and what its reader has
done with, in whatever way: all that was for that reader alone. Nothing is sampled, no session is
bound, and no soft reference is left: such blocks go first.

All calls are made on the engine's thread.
"""

from __future__ import annotations

import time
from collections import Counter
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, PrefixSalt, unpack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Accepted, EndPrefill, Prefill, Reject, Released, RpcAnswer
from ownerserve.node.transfers.lending import ONE_TOKEN
from ownerserve.node.transfers.turn_lends import ComingPrompt, TurnLends
from ownerserve.node.vocabulary.chains import PromptPrefix, prefix_of

UNASKED_S = 30.0
"""A prompt that nobody asks to read is kept so long."""


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
    them, `told_bytes` how much was told after a layer, and after a step: metric labels."""

    def __init__(self, cache: HeteroCache, turns: TurnLends, engine: PrefillEngine) -> None:
        self.counts: Counter[str] = Counter()
        self.told_bytes = turns.told_bytes
        self._turns = turns
        self._engine = engine
        self._cache = cache
        self._held = 0
        self._block = cache.layout.block_tokens
        self._unasked_until_s: dict[TurnId, float] = {}  # oldest first

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
        ids = unpack(asked.tokens[: end * TOKEN_BYTES])
        prefix = prefix_of(ids, self._block, PrefixSalt(asked.cache_salt))
        tip = prefix.tip
        assert tip is not None
        is_here = self._is_here(prefix)
        known = max(self._cache.match(prefix.tokens).range_tokens, min(asked.source_tokens, end))
        takes = NOTHING if is_here else self._engine.prefill_ms(end - known, known)
        turn_id = self._begun(asked, prefix, count) if not is_here else self._no_turn()
        if isinstance(turn_id, WorkerRefusal):
            return self._reject(turn_id)
        digests = prefix.hashed.digests[: prefix.blocks]
        self._turns.add(ComingPrompt(turn_id, prefix.tokens, digests, is_over=is_here))
        self._unasked_until_s[turn_id] = now + UNASKED_S
        self.counts["accepted"] += 1
        return Accepted(turn_id, end, tip, sum(takes), takes.compute_ms)

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
        if self._turns.of(turn_id) is not None:
            self._turns.over(turn_id)

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
        if prompt is not None:
            self.counts[end] += 1
            if not prompt.is_over:
                self._engine.abort_prefill(turn_id)
