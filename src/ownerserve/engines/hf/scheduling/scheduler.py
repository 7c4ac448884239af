"""The scheduler decides which sequences compute which tokens in the next step. Iteration-level, a
pure state machine.

Owns the queue, the running set and each sequence's progress; drives the cache (which owns slots
and residency). It never touches a tensor, a clock, text or randomness: `now` is an argument,
which token was sampled and whether it ended a choice are told.

    phase      leaves by                                        holds in the cache
    HELD       release: its state is there, or it goes on       nothing
    WAITING    plan: begin + room for the first chunk           nothing
               plan: can never fit                              -> failed
    PREFILL    step_done of the chunk that ends the prompt      path lock, slots, state block
                 (a prompt that only begins another one is over with it)
               plan: no room and it is the youngest             -> WAITING (preempted)
    DECODE     step_done with an ended choice                   the same
               plan: no room and it is the youngest             -> WAITING (preempted)
               stop: it is to go on at another worker           -> HELD

A preempted sequence comes back with prompt + generated tokens as its prompt; what it sealed is
still in the cache. Sequences are ordered by arrival everywhere: the oldest is planned first and
preempted last, so the oldest always advances and nothing starves. Each step runs every decode
beside a bounded amount of prefill, so neither waits for more than one step's share of the other.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Tokens
from enum import StrEnum

import msgspec

from ownerserve.cache.effects import Effect
from ownerserve.cache.outcomes import Begun, CacheRefused, NoRoom, Turn
from ownerserve.engines.hf.scheduling.step import (
    AdmittedPrompt,
    CachePort,
    CheckpointsOf,
    Chunk,
    Intake,
    NoPromises,
    PlannedToken,
    Promises,
    QueuedPrompt,
    RequestArrival,
    RequestCounts,
    RequestRejected,
    ResumeOf,
    SchedulerLimits,
    SchedulerLoad,
    StepPlan,
)
from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.ids import PrefixHash, SessionId, TurnId
from ownerserve.kv.prefix import Packed
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.node.vocabulary.chains import PromptPrefix


class SequencePhase(StrEnum):
    """A `SequencePhase` is where a sequence stands: outside the queue while state is brought for
    it, queued, computing its prompt, or writing its answer."""

    HELD = "held"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class Sequence(msgspec.Struct):
    """A `Sequence` is one choice of a request on its way. `age` orders by (arrival, choice): small
    is old.

    `said` was sampled behind the prompt; the first `computed` tokens have their state in slots;
    slots are reserved for `reserved`. `siblings` are choices that fork off when the prompt is done.
    Below `write_floor` range state is kept: what
    is computed there is a replay. State is kept at `checkpoints` where a chunk ends there; one at
    risk of preemption keeps it at the next chunk's end. It may grow to `most_tokens`; a
    promised one was given its room beforehand. One that `begins` a prompt of so many tokens is
    computed in the pieces of that, and nothing is sampled for it.
    """

    turn_id: TurnId
    request_id: str
    age: tuple[int, int]
    prompt: PromptPrefix
    said: list[int] = []
    session_id: SessionId | None = None
    siblings: tuple[TurnId, ...] = ()
    phase: SequencePhase = SequencePhase.WAITING
    computed: int = 0
    reserved: int = 0
    preempted: int = 0
    write_floor: int = 0
    checkpoints: Collection[int] = ()
    most_tokens: int = 0
    is_promised: bool = False
    is_at_risk: bool = False
    intake: Intake = Intake.BEGIN
    begins: int = 0

    @property
    def length(self) -> int:
        """`length` is the number of tokens of prompt and answer so far."""
        return self.prompt.count + len(self.said)

    def packed(self) -> Packed:
        """Return the packed tokens of prompt and answer so far, under the prompt's salt."""
        prompt = self.prompt
        return (
            prompt.tokens + prompt.salted(self.said, prompt.count) if self.said else prompt.tokens
        )

    def span(self, start: int, end: int) -> Tokens[int]:
        """Return the tokens [start, end) as they are computed. O(end - start)."""
        known = self.prompt.count
        tokens = self.prompt.plain(start, end)
        if end > known:
            tokens.extend(self.said[max(0, start - known) : end - known])
        return tokens

    def tip(self) -> PrefixHash | None:
        """Return the digest of all full blocks that a turn leaves: the last token is never
        computed. None for a turn that has no session, or fills no block."""
        if self.session_id is None:
            return None
        return self.prompt.answered(self.said[:-1]).digest_at(self.computed)


def blocks_to_come(sequence: Sequence, block: int) -> int:
    """Return how many blocks a sequence may still take, those of choices that have not forked
    included."""
    most = -(-sequence.most_tokens // block)
    forks = len(sequence.siblings) * max(0, most - sequence.length // block)
    return max(0, most - sequence.reserved // block) + forks


def age_of(sequence: Sequence) -> tuple[int, int]:
    """Return the key that orders sequences by arrival, oldest first."""
    return sequence.age


# ---- where prefill chunks end and where snapshots are taken
#
#     B = 64, chunk = 256, N = 600
#
#     0        256       512 576 600
#     |---------|---------|---|--|      chunks; '|' at 576 = floor((N-1)/B)*B = floor(N/B)*B
#                             ^         snapshot
#
# Chunk ends lie on an absolute grid: a prefix is computed in the same pieces whoever computes it.


def resume_points(total: int, block: int) -> tuple[int, int]:
    """Return the boundaries worth a snapshot in a prompt of `total` tokens: the last one that
    leaves a token to compute (what the same prompt can re-use), and the last one at all (what a
    longer one can). They differ only when `total` is a boundary itself. 0 means none."""
    return (total - 1) // block * block, total // block * block


def chunk_end(start: int, total: int, *, block: int, chunk: int) -> int:
    """Return the end of the prefill chunk that starts at `start`: the next multiple of `chunk`, cut
    short at the resume points and at `total`."""
    ends = (start - start % chunk + chunk, *resume_points(total, block), total)
    return min(end for end in ends if end > start)


def open_turn(
    cache: CachePort, sequence: Sequence, resume_of: ResumeOf, *, now: float
) -> Begun | CacheRefused:
    """Open a turn in the cache: as what it adds to its session, or from its whole prompt.

    A prompt that begins with its session's tokens is an append: nothing of those is looked at. Any
    other one is a begin, which compares all of it.
    """
    turn = Turn(sequence.turn_id, sequence.session_id, sequence.packed())
    append = cache.sessions.append_of(turn, sequence.prompt.digest_at)
    if append is not None:
        sequence.intake = Intake.APPEND
        return cache.append(append, now)
    sequence.intake = Intake.BEGIN
    resume = resume_of(turn.tokens)
    if resume is None:
        return cache.begin(turn, now)
    return cache.begin(turn, now, resume=resume)


class Scheduler:
    """The `Scheduler` of one engine owns its queue and its running sequences, and plans each step.

    Calls alternate: `plan`, then `step_done`; `arrive` and `abort` between.
    """

    def __init__(
        self,
        cache: CachePort,
        limits: SchedulerLimits,
        *,
        resume_of: ResumeOf | None = None,
        checkpoints_of: CheckpointsOf | None = None,
    ) -> None:
        block = cache.layout.block_tokens
        if limits.chunk_tokens < block or limits.chunk_tokens % block:
            raise InvalidInput(
                "chunk", f"{limits.chunk_tokens} tokens", f"use a multiple of the block, {block}"
            )
        self.counts = RequestCounts()
        self.promises: Promises = NoPromises()
        """Keeps room for turns that are not here yet; `TurnAdmission` sets itself here."""
        self.limits = limits
        """What the scheduler may let run and wait."""
        self._cache = cache
        self._resume_of = resume_of or (lambda _: None)
        self._checkpoints_of = checkpoints_of or (lambda start, end: ())
        self._block = block
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._held: dict[TurnId, Sequence] = {}
        self._requests: dict[str, dict[TurnId, Sequence]] = {}
        self._sequences: dict[TurnId, Sequence] = {}
        # The head of the queue found no room; nothing will change that until slots are released.
        self._starved = False
        self._in_flight: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        """`has_work` tells whether a step would do something; else only an event can bring work."""
        if self._running:
            return True
        head = self._next_in_line()
        return head is not None and not self._starved and not self._is_withheld(head)

    def load(self) -> SchedulerLoad:
        """Return a dated copy of what is queued and running."""
        queued = (*self._waiting, *self._held.values())
        pending = sum(s.length for s in queued)
        pending += sum(
            s.length - s.computed for s in self._running if s.phase is SequencePhase.PREFILL
        )
        growth = sum(blocks_to_come(s, self._block) for s in self._running)
        to_come = sum(blocks_to_come(s, self._block) for s in queued)
        return SchedulerLoad(len(queued), len(self._running), pending, growth, to_come)

    # ---- events

    def arrive(self, arrival: RequestArrival) -> QueuedPrompt | RequestRejected:
        """Take a request into the queue, or say why it can't ever be served here."""
        self.counts.arrived += 1
        # The last sampled token is never computed, so it needs no slot.
        longest = arrival.prompt.count + arrival.max_new_tokens - 1
        if longest > self.limits.sequence_tokens:
            return self._reject(
                WorkerRefusal.CONTEXT_LENGTH,
                f"{arrival.prompt.count} prompt tokens and {arrival.max_new_tokens} new ones "
                f"need {longest} places; a sequence here has {self.limits.sequence_tokens}",
            )
        is_full = max(len(self._waiting), len(self._held)) >= self.limits.max_waiting
        if is_full and not arrival.is_promised:
            return self._reject(
                WorkerRefusal.QUEUE_FULL,
                f"{len(self._waiting)} requests wait, and {len(self._held)} for their state",
            )
        first, *siblings = arrival.turn_ids
        self._enqueue(
            Sequence(
                turn_id=first,
                request_id=arrival.request_id,
                age=(self.counts.arrived if arrival.order is None else arrival.order, 0),
                prompt=arrival.prompt,
                session_id=None if arrival.session_id is None else SessionId(arrival.session_id),
                siblings=tuple(siblings),
                most_tokens=longest,
                is_promised=arrival.is_promised,
                begins=arrival.begins,
            )
        )
        return QueuedPrompt()

    def hold(self, turn_id: TurnId) -> None:
        """Take a queued turn out of the queue while state is brought for it; it keeps its place
        among arrivals. It costs no step anything."""
        sequence = self._sequences[turn_id]
        self._waiting.remove(sequence)
        sequence.phase = SequencePhase.HELD
        self._held[turn_id] = sequence

    def stop(self, turn_id: TurnId, now: float) -> bool:
        """Hold a turn that writes its answer, as what it has computed becomes its session's, for
        others to read; False: it writes none now. Released, it goes on from there."""
        self._between_steps()
        sequence = self._sequences.get(turn_id)
        if sequence is None or not sequence.said or sequence.phase is SequencePhase.HELD:
            return False
        if sequence.phase is SequencePhase.WAITING:  # it was preempted
            self._waiting.remove(sequence)
        else:
            self._cache.finish(turn_id, now, tip=sequence.tip())
            self._running.remove(sequence)
        sequence.phase, sequence.computed, sequence.reserved = SequencePhase.HELD, 0, 0
        sequence.write_floor, sequence.is_at_risk = 0, False
        sequence.preempted += 1  # when it comes back it is no new one
        self._held[turn_id] = sequence
        self._starved = False
        return True

    def release(self, turn_id: TurnId) -> None:
        """Let a held turn run. A turn that was aborted meanwhile is no error."""
        sequence = self._held.pop(turn_id, None)
        if sequence is not None:
            sequence.phase = SequencePhase.WAITING
            insort(self._waiting, sequence, key=age_of)
        self._starved = False  # what was reserved for it can be had, or evicted, again

    def room_returned(self) -> None:
        """Look for room again: slots that were reserved for state to come can be had, or evicted,
        whether or not a held turn waits for more of it."""
        self._starved = False

    def checkpoint(self, turn_ids: Iterable[TurnId]) -> None:
        """Keep the state of these turns at their next boundary: room is short, and they are the
        first to be preempted. Those that have ended are no error. Decoding turns do so anyway."""
        for turn_id in turn_ids:
            sequence = self._sequences.get(turn_id)
            if sequence is not None and sequence.phase is SequencePhase.PREFILL:
                sequence.is_at_risk = True

    def abort(self, request_id: str, now: float) -> None:
        """Drop a request with all its choices. One that has ended already is no error."""
        self._between_steps()
        if request_id in self._requests:
            self.counts.aborted += 1
            self._drop(request_id, now)

    def plan(self, now: float) -> StepPlan:
        """Decide the next step."""
        self._between_steps()
        plan = StepPlan()
        self._give_way(plan, now)
        for sequence in tuple(self._running):
            if sequence.phase is SequencePhase.DECODE:
                self._plan_row(sequence, plan, now)
            elif sequence.phase is SequencePhase.PREFILL:
                self._plan_chunk(sequence, plan, now)
            # WAITING: an older one has preempted it in this pass
        if not plan.preempted:
            self._admit(plan, now)
        self._in_flight = plan
        return plan

    def step_done(
        self, tokens: Mapping[TurnId, int], ended: Collection[TurnId], *, now: float
    ) -> tuple[Effect, ...]:
        """Take the result of the planned step: `tokens` were sampled, and those of `ended` were
        a choice's last. The effects (snapshots, forks) are to be applied before anything else
        runs."""
        plan, self._in_flight = self._in_flight, None
        assert plan is not None, "step_done without a plan"
        effects: list[Effect] = []
        for chunk in plan.chunks:
            sequence = self._sequences[chunk.turn_id]
            computed = sequence.prompt.salted(chunk.tokens, chunk.start)
            self._cache.advance(sequence.turn_id, computed, now)
            sequence.computed += len(chunk.tokens)
            if self._keeps(sequence):
                sequence.is_at_risk = False
                effects += self._cache.snapshot(sequence.turn_id, now)
            if chunk.ends_turn:
                self._leave(sequence, now)
            elif chunk.sample_for:
                effects += self._fork_siblings(sequence, tokens, ended, now=now)
                self._take(sequence, tokens[sequence.turn_id], ended, now=now)
        for row in plan.rows:
            sequence = self._sequences[row.turn_id]
            computed = sequence.prompt.salted((row.token,), sequence.computed)
            self._cache.advance(sequence.turn_id, computed, now)
            sequence.computed += 1
            if sequence.computed % self._block == 0:
                effects += self._cache.snapshot(sequence.turn_id, now)
            self._take(sequence, tokens[sequence.turn_id], ended, now=now)
        return tuple(effects)

    def _keeps(self, sequence: Sequence) -> bool:
        """Return whether the state that a chunk has just reached is to be kept."""
        at = sequence.computed
        if at < sequence.write_floor or at % self._block:
            return False  # in a replay, or beyond the last boundary
        wanted = resume_points(sequence.length, self._block)
        return at in wanted or at in sequence.checkpoints or sequence.is_at_risk

    # ---- planning one sequence

    def _give_way(self, plan: StepPlan, now: float) -> None:
        """Preempt the youngest sequence, one a step, while a promised one that is older waits for
        room."""
        if not self._starved or not self._running:
            return
        victim = self._running[-1]
        waiting = (s for s in self._waiting if s.is_promised)
        if any(promised.age < victim.age for promised in waiting):
            self._preempt(victim, plan, now)

    def _is_withheld(self, sequence: Sequence) -> bool:
        """Return whether the sequence's prompt would take room that is kept for others which stand
        before it."""
        blocks = -(-sequence.length // self._block)
        return not sequence.is_promised and self.promises.withholds(blocks, sequence.age[0])

    def _plan_row(self, sequence: Sequence, plan: StepPlan, now: float) -> None:
        if self._make_room(sequence, sequence.computed + 1, plan=plan, now=now):
            table = self._cache.table(sequence.turn_id)
            plan.rows.append(
                PlannedToken(sequence.turn_id, table, sequence.said[-1], sequence.computed)
            )

    def _plan_chunk(self, sequence: Sequence, plan: StepPlan, now: float) -> None:
        end = self._next_end(sequence)
        if self._affords(plan, end - sequence.computed) and self._make_room(
            sequence, end, plan=plan, now=now
        ):
            self._add_chunk(sequence, end, plan)

    def _add_chunk(self, sequence: Sequence, end: int, plan: StepPlan) -> None:
        last, samples = end == sequence.length, not sequence.begins
        plan.chunks.append(
            Chunk(
                turn_id=sequence.turn_id,
                table=self._cache.table(sequence.turn_id),
                tokens=sequence.span(sequence.computed, end),
                start=sequence.computed,
                sample_for=(sequence.turn_id, *sequence.siblings) if last and samples else (),
                write_floor=sequence.write_floor,
                ends_turn=last and not samples,
            )
        )

    def _next_end(self, sequence: Sequence) -> int:
        return chunk_end(
            sequence.computed,
            sequence.begins or sequence.length,
            block=self._block,
            chunk=self.limits.chunk_tokens,
        )

    def _affords(self, plan: StepPlan, tokens: int) -> bool:
        """Return whether a chunk of `tokens` fits the step's budget. Chunks are never cut to fit:
        the grid is what makes re-use exact."""
        spent = plan.prefill_tokens
        return spent == 0 or spent + tokens <= self.limits.prefill_tokens_a_step

    def _make_room(self, sequence: Sequence, upto: int, *, plan: StepPlan, now: float) -> bool:
        """Reserve slots for [0, upto), preempting from the youngest; False: the sequence left the
        plan."""
        while upto > sequence.reserved:
            got = self._cache.reserve(sequence.turn_id, upto, now)
            if not isinstance(got, NoRoom):
                plan.effects += got
                sequence.reserved = -(-upto // self._block) * self._block
                continue
            victim = self._running[-1]
            if victim is not sequence:
                self._preempt(victim, plan, now)
            elif len(self._running) > 1 or self._reserves_elsewhere:
                self._preempt(sequence, plan, now)
                self._starved = len(self._running) == 0
                return False
            elif not self.promises.revoke():
                self._fail(sequence, plan, now)
                return False
        return True

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Let sequences in from the queue's head while there is prefill budget and room.

        `begin` comes as late as possible, so that a prompt meets what earlier ones have sealed.
        """
        budget = self.limits.prefill_tokens_a_step
        while (
            (sequence := self._next_in_line()) is not None
            and not self._starved
            and len(self._running) < self.limits.max_running
            and plan.prefill_tokens < budget
            and not self._is_withheld(sequence)
        ):
            begun = self._begin(sequence, now)
            if begun is None:
                if self._running or self._reserves_elsewhere:
                    self._starved = True
                elif not self.promises.revoke():
                    self._fail(sequence, plan, now)
                continue
            restored, effects = begun
            plan.effects += effects
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=age_of)
            sequence.phase, sequence.computed = SequencePhase.PREFILL, restored
            plan.admitted.append(
                AdmittedPrompt(
                    sequence.request_id,
                    sequence.turn_id,
                    restored,
                    sequence.preempted,
                    sequence.write_floor,
                    sequence.intake,
                )
            )
            end = self._next_end(sequence)
            if not self._affords(plan, end - restored):
                return
            self._add_chunk(sequence, end, plan)

    def _next_in_line(self) -> Sequence | None:
        return self._waiting[0] if self._waiting else None

    @property
    def _reserves_elsewhere(self) -> bool:
        """`_reserves_elsewhere` tells whether slots may be reserved for held turns, or are for
        state that comes while no turn waits for it: no room now does not mean never."""
        return bool(self._held) or len(self._cache.ingest) > 0

    def _begin(self, sequence: Sequence, now: float) -> tuple[int, tuple[Effect, ...]] | None:
        """Open the turn and take the first chunk's slots; None: there is no room, and nothing is
        taken."""
        begun = open_turn(self._cache, sequence, self._resume_of, now=now)
        if isinstance(begun, CacheRefused):
            return None
        sequence.write_floor = begun.write_floor
        sequence.checkpoints = self._checkpoints_of(begun.restored, sequence.length)
        sequence.computed = begun.restored
        end = self._next_end(sequence)
        sequence.computed = 0
        got = self._cache.reserve(sequence.turn_id, end, now)
        if isinstance(got, NoRoom):
            self._cache.abort(sequence.turn_id, now)
            return None
        sequence.reserved = -(-end // self._block) * self._block
        return begun.restored, (*begun.effects, *got)

    # ---- transitions

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=age_of)
        self._sequences[sequence.turn_id] = sequence
        self._requests.setdefault(sequence.request_id, {})[sequence.turn_id] = sequence

    def _preempt(self, sequence: Sequence, plan: StepPlan, now: float) -> None:
        """Free the slots that are the sequence's alone and queue it again."""
        at_boundary = sequence.computed and sequence.computed % self._block == 0
        if at_boundary and sequence.computed >= sequence.write_floor:
            # Mid-prefill the state is at a boundary: keep it, so the prefill can go on from here.
            # Not in mid-replay: there the windows are not right yet.
            plan.effects += self._cache.snapshot(sequence.turn_id, now)
        self._cache.abort(sequence.turn_id, now)
        self._running.remove(sequence)
        sequence.phase, sequence.computed, sequence.reserved = SequencePhase.WAITING, 0, 0
        sequence.write_floor, sequence.is_at_risk = 0, False
        sequence.preempted += 1
        insort(self._waiting, sequence, key=age_of)
        plan.preempted.append(sequence.turn_id)
        self.counts.preemptions += 1
        self._starved = False

    def _fork_siblings(
        self,
        parent: Sequence,
        tokens: Mapping[TurnId, int],
        ended: Collection[TurnId],
        *,
        now: float,
    ) -> list[Effect]:
        """Let each other choice go on from the prompt with its own first token.

        One that finds no room waits as a sequence of its own, and then re-uses the prompt.
        """
        effects: list[Effect] = []
        for choice, turn_id in enumerate(parent.siblings, start=1):
            if turn_id in ended:
                continue
            child = Sequence(
                turn_id=turn_id,
                request_id=parent.request_id,
                age=(parent.age[0], choice),
                prompt=parent.prompt,
                said=[*parent.said, tokens[turn_id]],
                most_tokens=parent.most_tokens,
                is_promised=parent.is_promised,
            )
            self._enqueue(child)
            if len(self._running) >= self.limits.max_running:
                continue
            forked = self._cache.fork(parent.turn_id, turn_id, now)
            if isinstance(forked, NoRoom | CacheRefused):
                continue
            effects += forked
            self._waiting.remove(child)
            insort(self._running, child, key=age_of)
            child.phase = SequencePhase.DECODE
            child.computed, child.reserved = parent.computed, parent.reserved
        parent.siblings = ()
        return effects

    def _take(
        self, sequence: Sequence, token: int, ended: Collection[TurnId], *, now: float
    ) -> None:
        """Give a sequence its next token: it decodes on, or its choice is over."""
        sequence.said.append(token)
        sequence.phase = SequencePhase.DECODE
        if sequence.turn_id in ended:
            self._leave(sequence, now)

    def _leave(self, sequence: Sequence, now: float) -> None:
        """End a sequence that is done."""
        self._cache.finish(sequence.turn_id, now, tip=sequence.tip())
        self._running.remove(sequence)
        self._starved = False
        del self._sequences[sequence.turn_id]
        live = self._requests[sequence.request_id]
        del live[sequence.turn_id]
        if not live:
            del self._requests[sequence.request_id]
            self.counts.done += 1

    def _reject(self, reason: WorkerRefusal, message: str) -> RequestRejected:
        self.counts.rejected += 1
        return RequestRejected(reason, message)

    def _fail(self, sequence: Sequence, plan: StepPlan, now: float) -> None:
        """End the request of a sequence that is alone in the pools and still finds no room."""
        self.counts.failed += 1
        plan.failed.append(sequence.request_id)
        self._drop(sequence.request_id, now)

    def _drop(self, request_id: str, now: float) -> None:
        for sequence in self._requests.pop(request_id).values():
            if sequence.phase is SequencePhase.HELD:
                del self._held[sequence.turn_id]
            elif sequence.phase is SequencePhase.WAITING:
                self._waiting.remove(sequence)
            else:
                self._cache.abort(sequence.turn_id, now)
                self._running.remove(sequence)
            del self._sequences[sequence.turn_id]
        self.counts.done += 1
        self._starved = False

    # ---- self-checks

    def _between_steps(self) -> None:
        assert self._in_flight is None, "a step is in flight"

    def check(self) -> None:
        """Raise InvariantViolated unless the queue, the running set and the counts agree."""
        self._cache.check()
        counts = self.counts
        problems = {
            "invariant 3: arrived = done + rejected + live": counts.arrived
            == counts.done + counts.rejected + len(self._requests),
            "every sequence is held, waiting or running": sorted(self._sequences)
            == sorted((*self._held, *(s.turn_id for s in (*self._waiting, *self._running)))),
            "oldest first": self._waiting == sorted(self._waiting, key=age_of)
            and self._running == sorted(self._running, key=age_of),
            "at most max_running": len(self._running) <= self.limits.max_running,
            "waiting ones hold nothing": all(
                s.phase is phase and s.computed == s.reserved == 0
                for phase, sequences in (
                    (SequencePhase.WAITING, self._waiting),
                    (SequencePhase.HELD, self._held.values()),
                )
                for s in sequences
            ),
            "a decode has one token to compute": all(
                s.computed == s.length - 1 for s in self._running if s.phase is SequencePhase.DECODE
            ),
        }
        for statement, holds in problems.items():
            if not holds:
                raise InvariantViolated(statement)
