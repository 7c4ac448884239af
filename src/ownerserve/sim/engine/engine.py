"""A modelled engine runs continuous batching over the production cache, iteration by iteration.

Owns the queue, the running sequences and the step in flight. Every decision on memory is
HeteroCache's; what a step takes is the pace's. Knows no clock and schedules nothing: whoever runs
it asks what comes next and says when that is over.

    start(now) -> how long the next steps take      end(now) -> who began to answer, who is done
    shorten(elapsed, now) when something arrived    None: nothing to do

As vLLM V1 does: all decodes run in each step, beside at most `step_tokens` tokens of prefill in
chunks; running before waiting, oldest first; no room preempts the youngest, which is computed anew;
nobody is let in by a step that has thrown somebody out.
Steps without prefill are *folded*: nobody comes or goes before the first answer ends, so k of them
are one event that takes k * first + growth * k * (k - 1) / 2. `longest_fold` 1 is the oracle.
A step has its blocks before it begins; those of a fold's later steps are taken when it ends or is
shortened, and were found free or evictable when it began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import ceil, sqrt
from operator import attrgetter

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import CacheRefusal, CacheRefused, NoRoom, Turn
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import TOKEN_BYTES
from ownerserve.sim.engine.batch import FOLD_MAX, BatchCounts, BatchLimits, NodeHooks, StepsEnded
from ownerserve.sim.engine.pace import Pace
from ownerserve.sim.engine.sequence import SimSequence

_order_of = attrgetter("order")


def _keeps(blocks: int, now: float) -> bool:
    """End no lend: there is none."""
    return False


class SimEngine:
    """An engine owns its queue, its running sequences and the step in flight. Calls alternate:
    `start`, then `end`; `arrive` comes between them or in a step."""

    def __init__(
        self,
        cache: HeteroCache,
        pace: Pace,
        limits: BatchLimits,
        *,
        unit_tokens: int,
        longest_fold: int = FOLD_MAX,
        hooks: NodeHooks,
    ) -> None:
        self.counts = BatchCounts()
        self.yields: Callable[[int, float], bool] = _keeps
        """Ends a lend to a peer, where a turn misses so many blocks."""
        self.pending_tokens = 0
        self.decoding: list[SimSequence] = []
        self.cache = cache
        self._pace = pace
        self._limits = limits
        self._unit, self._block = unit_tokens, cache.layout.block_tokens
        self._longest_fold = longest_fold
        self._hooks = hooks
        self._has_points = bool(cache.layout.point_names)
        self._waiting: deque[SimSequence] = deque()
        self.prefilling: list[SimSequence] = []
        self._order = 0
        # Blocks to be had when the queue's head was refused; None: it was not.
        self._starved_room: int | None = None
        self._has_preempted = False
        self._steps = 0
        self._chunks: list[tuple[SimSequence, int]] = []
        self._failed: list[SimSequence] = []
        self._at_risk: set[TurnId] = set()
        self._first_ms = self._growth_ms = 0.0
        self._new = 0  # tokens of prefill in the step
        self._context = 0  # sum of positions over `decoding`

    # -- what others see ------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """`running` counts the sequences that run."""
        return len(self.decoding) + len(self.prefilling)

    @property
    def waiting(self) -> int:
        """`waiting` counts the sequences that wait."""
        return len(self._waiting)

    @property
    def folds(self) -> bool:
        """Whether more than one step is in flight, which `shorten` could end earlier."""
        return self._steps > 1

    # -- events ---------------------------------------------------------------------------------

    def arrive(self, sequence: SimSequence) -> None:
        """Take a sequence into the queue."""
        self._order += 1
        sequence.order = self._order
        self.pending_tokens += sequence.pending_tokens
        self._waiting.append(sequence)

    def checkpoint(self, turns: Iterable[TurnId]) -> None:
        """Keep these prefills' state at the boundary that they reach next; decodes keep theirs
        anyway."""
        self._at_risk.update({s.turn_id for s in self.prefilling}.intersection(turns))

    def everyone(self) -> list[SimSequence]:
        """Return all sequences here, oldest first."""
        return sorted((*self._waiting, *self.prefilling, *self.decoding), key=_order_of)

    def withdraw(self, sequence: SimSequence, now: float) -> None:
        """Take a sequence out that nobody waits for, between two steps or from the queue; what it
        sealed stays cached."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
            self.cache.abort(sequence.turn_id, now)
        elif sequence in self.decoding:
            self.decoding.remove(sequence)
            self._context -= sequence.position
            self.cache.abort(sequence.turn_id, now)
        self._at_risk.discard(sequence.turn_id)
        self._recount(sequence, 0)
        self._starved_room = None

    def start(self, now: float) -> float | None:
        """Plan what runs next and return how many seconds it takes; None when nothing can run."""
        assert not self._steps, "a step is in flight"
        self._chunks.clear()
        self._has_preempted, unit = False, self._unit
        for sequence in [s for s in self.decoding if s.position >= s.reserved * unit]:
            if sequence in self.decoding:  # nobody older has thrown it out
                self._make_room(sequence, sequence.position + 1, now)
        if self._waiting or self.prefilling:
            self._plan_chunks(now)
        if not self._chunks and not self.decoding:
            return None
        self._has_preempted = False  # the next step may let somebody in: no fold then
        self._steps = 1 if self._chunks or (self._waiting and self._lets_in()) else self._fold()
        return self._time() / 1000.0

    def shorten(self, elapsed_s: float, now: float) -> float | None:
        """End a fold with the step that is under way, as something arrived `elapsed_s` into it.

        Returns the new duration in seconds; None when nothing changes.
        """
        if self._chunks or self._steps <= 1:
            return None
        steps = min(self._begun(elapsed_s * 1000.0), self._steps)
        for sequence in self.decoding:
            if sequence.position + steps > sequence.reserved * self._unit:
                self._reserve(sequence, sequence.position + steps, now)
        if steps == self._steps:
            return None
        self._steps = steps
        return self._duration_ms(steps) / 1000.0

    def _begun(self, elapsed_ms: float) -> int:
        """Return how many steps of the fold have begun by then."""
        half = self._growth_ms / 2.0
        linear = self._first_ms - half
        if half > 0.0:
            steps = ceil((sqrt(linear * linear + 4.0 * half * elapsed_ms) - linear) / (2.0 * half))
        else:
            steps = ceil(elapsed_ms / self._first_ms)
        steps = max(steps, 1)
        while steps > 1 and self._duration_ms(steps - 1) >= elapsed_ms:
            steps -= 1
        return steps

    def end(self, now: float) -> StepsEnded:
        """End what was planned, and return who began to answer and who is done."""
        steps, self._steps = self._steps, 0
        ended = StepsEnded([], [])
        self._count(steps)
        going: list[SimSequence] = []
        full: list[tuple[int, int, SimSequence]] = []
        unit, context = self._unit, 0
        for index, sequence in enumerate(self.decoding):
            sequence.position = position = sequence.position + steps
            sequence.left = left = sequence.left - steps
            lacks = position > sequence.reserved * unit
            if lacks and not self._reserve(sequence, position, now) and left:
                self._put_back(sequence, now)  # somebody took the fold's room in the meantime
                continue
            if position // unit > sequence.told:
                began = position - steps
                units = range(sequence.told + 1, position // unit + 1)
                full.extend([(upto * unit - began, index, sequence) for upto in units])
            if left:
                going.append(sequence)
                context += position
            else:
                ended.done.append(sequence)
        self.decoding, self._context = going, context
        if full:
            self._tell_in_order(full, steps, now)
        for sequence, tokens in self._chunks:
            self._advance(sequence, tokens, ended, now=now)
        for sequence in ended.done:
            self.cache.finish(sequence.turn_id, now)
        if ended.done:
            self._starved_room = None
        if ended.done or self._chunks:  # at neither of which a fold goes on
            self.cache.border.move(now)
        return ended

    # -- time -----------------------------------------------------------------------------------

    def _time(self) -> float:
        """Return how long the steps take, in ms."""
        new, weighted, steps = 0, 0.0, self._steps
        for sequence, tokens in self._chunks:
            new += tokens
            weighted += tokens * (sequence.position + 0.5 * tokens)
        batch = len(self.decoding)
        self._new = new
        self._first_ms = first_ms = self._pace.step_ms(new, weighted, self._context, batch)
        self._growth_ms = growth_ms = self._pace.d_ms * batch
        return steps * first_ms + growth_ms * (steps * (steps - 1) / 2)

    def _duration_ms(self, steps: int) -> float:
        return steps * self._first_ms + self._growth_ms * (steps * (steps - 1) / 2)

    def _count(self, steps: int) -> None:
        counts, batch = self.counts, len(self.decoding)
        took_ms = steps * self._first_ms + self._growth_ms * (steps * (steps - 1) / 2)
        counts.steps += steps
        counts.busy_ms += took_ms
        counts.decoded_tokens += steps * batch
        counts.decoding_ms += took_ms * batch
        if self._chunks:
            counts.prefill_tokens += self._new
            if batch:
                alone_ms = self._pace.step_ms(0, 0.0, self._context, batch)
                counts.interfered_ms += batch * (took_ms - alone_ms)

    # -- planning -------------------------------------------------------------------------------

    def _fold(self) -> int:
        """Return the steps until the first answer ends, as many of them as there is room for.

        A fold goes no further than to where a pool is called short: the node looks then. The first
        step's blocks are reserved.
        """
        steps = min(self._longest_fold, *[sequence.left for sequence in self.decoding])
        levels, low = self.cache.occupancy, self.cache.pressure.watermarks.low
        spare = levels.blocks.free - low * levels.blocks.capacity
        most = len(self.decoding) * (steps // self._unit // self._block + 2)
        if most > spare:  # else there is room enough wherever they stand
            steps = self._within(steps, levels.obtainable_blocks())
            steps = min(steps, self._within(steps, max(0, int(spare))) + 1)
        for pool in levels.points:
            if pool.free - len(self.decoding) < low * pool.capacity:
                size = self._unit * self._block
                return min(steps, *[size - s.position % size for s in self.decoding])
        return steps

    def _within(self, steps: int, blocks: int) -> int:
        """Return the most steps, up to `steps`, that take no more than so many blocks."""
        if self._needed(steps) <= blocks:
            return steps
        low, high = 1, steps
        while high - low > 1:
            middle = (low + high) // 2
            if self._needed(middle) <= blocks:
                low = middle
            else:
                high = middle
        return low

    def _needed(self, steps: int) -> int:
        """Return the blocks that all decodes take for so many steps."""
        unit, block = self._unit, self._block
        total = 0
        for sequence in self.decoding:
            more = -(-(sequence.position + steps) // unit) - sequence.reserved
            if more > 0:
                total += -(-more // block)
        return total

    def _plan_chunks(self, now: float) -> None:
        budget = self._limits.step_tokens - len(self.decoding)
        for sequence in tuple(self.prefilling):
            if budget <= 0:
                return
            tokens = min(budget, sequence.target - sequence.position)
            if sequence in self.prefilling and self._make_room(
                sequence, sequence.position + tokens, now
            ):
                self._chunks.append((sequence, tokens))
                budget -= tokens
        while budget > 0 and self._waiting and self._lets_in():
            budget -= self._admit(self._waiting[0], budget, now)

    def _lets_in(self) -> bool:
        """Return whether the queue's head is to be tried: not again before there is more room."""
        running = len(self.decoding) + len(self.prefilling)
        if running >= self._limits.running or (self._has_preempted and running):
            return False
        starved = self._starved_room
        return starved is None or self.cache.occupancy.obtainable_blocks() > starved

    def _admit(self, sequence: SimSequence, budget: int, now: float) -> int:
        """Begin the queue's head and plan its first chunk; 0 when it can't begin now: only the
        first chunk's room is taken, but there must be room for all (scheduler_reserve_full_isl)."""
        turn_id, prompt = sequence.turn_id, sequence.prompt
        turn = Turn(turn_id, sequence.turn.name, prompt, sequence.priority, sequence.ttl_s)
        resume = self._hooks.resume(turn.tokens) if self._has_points else None
        begun = self.cache.begin(turn, now, resume=resume)
        if isinstance(begun, CacheRefused):
            if begun.reason is CacheRefusal.TOO_LONG:
                self._give_up(sequence)
            else:
                self._starved_room = self.cache.occupancy.obtainable_blocks()
            return 0
        unit, restored = self._unit, begun.restored
        sequence.told, sequence.write_floor = restored, begun.write_floor
        sequence.position = restored * unit
        sequence.reserved = begun.write_floor
        sequence.replayed_tokens = (begun.write_floor - restored) * unit
        if sequence.landed_tokens and sequence.landed_tokens // unit <= restored:
            sequence.position = max(
                sequence.position, min(sequence.landed_tokens, sequence.target - 1)
            )
        tokens = min(budget, sequence.target - sequence.position)
        upto = -(-(sequence.position + tokens) // unit)
        units = len(turn.tokens) // TOKEN_BYTES - begun.write_floor
        if not self._has_room(-(-units // self._block), now) or isinstance(
            self.cache.reserve(sequence.turn_id, upto, now), NoRoom
        ):
            self.cache.abort(sequence.turn_id, now)
            if not self.running and self._room_is_all():
                self._give_up(sequence)
            else:
                self._starved_room = self.cache.occupancy.obtainable_blocks()
            return 0
        sequence.reserved = max(upto, sequence.reserved)
        if sequence.begun_s < 0.0:
            sequence.begun_s = now
            sequence.restored_tokens = sequence.position
        if self._has_points:
            sequence.checkpoints = self._hooks.checkpoints(
                begun.restored, len(turn.tokens) // TOKEN_BYTES
            )
        self._waiting.popleft()
        self._recount(sequence, sequence.target - sequence.position)
        self.prefilling.append(sequence)
        self._chunks.append((sequence, tokens))
        return tokens

    def _has_room(self, blocks: int, now: float) -> bool:
        """Return whether a turn that begins could have so many blocks; lends give way to it."""
        while (short := blocks - self.cache.occupancy.obtainable_blocks()) > 0:
            if not self.yields(short, now):
                return False
        return True

    def _room_is_all(self) -> bool:
        """Return whether no room now is no room ever: nothing arrives, and nothing is lent."""
        return not sum(self.cache.ingest.counts()) and not len(self.cache.lends)

    def _give_up(self, sequence: SimSequence) -> None:
        """Take out a sequence that can never run here; the next one may be tried."""
        self._waiting.remove(sequence)
        self._recount(sequence, 0)
        self._failed.append(sequence)

    def failed(self) -> list[SimSequence]:
        """Return the sequences that can never run here, each once."""
        failed, self._failed = self._failed, []
        return failed

    # -- room -----------------------------------------------------------------------------------

    def _make_room(self, sequence: SimSequence, tokens: int, now: float) -> bool:
        """Reserve for [0, tokens), preempting from the youngest; return False when it was preempted
        itself."""
        upto = -(-tokens // self._unit)
        while upto > sequence.reserved:
            if not isinstance(self.cache.reserve(sequence.turn_id, upto, now), NoRoom):
                sequence.reserved = upto
                return True
            if self._preempt_youngest(now) is sequence:
                return False
        return True

    def _reserve(self, sequence: SimSequence, tokens: int, now: float) -> bool:
        """Reserve for [0, tokens) of a decode, more than it has; return whether there was room."""
        upto = -(-tokens // self._unit)
        if isinstance(self.cache.reserve(sequence.turn_id, upto, now), NoRoom):
            return False
        sequence.reserved = upto
        return True

    def _preempt_youngest(self, now: float) -> SimSequence:
        self._has_preempted = True
        victim = max((*self.decoding, *self.prefilling), key=_order_of)
        if victim in self.decoding:
            self.decoding.remove(victim)
            self._context -= victim.position
        else:
            self.prefilling.remove(victim)
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not victim]
        is_alone = not self.running
        self._put_back(victim, now)
        if is_alone and self._room_is_all():
            self._give_up(victim)
        return victim

    def _put_back(self, sequence: SimSequence, now: float) -> None:
        """Let a preempted sequence wait again, the oldest first; what it sealed stays cached.

        A prefill that stands at a boundary keeps its state there, and goes on from it.
        """
        at, block = sequence.told, self._block
        is_inside = 0 < sequence.position == at * self._unit < sequence.target
        if self._has_points and is_inside and not at % block and at >= sequence.write_floor:
            self.cache.snapshot(sequence.turn_id, now)
        self.cache.abort(sequence.turn_id, now)
        self._at_risk.discard(sequence.turn_id)
        sequence.forget()
        self.counts.preemptions += 1
        self._recount(sequence, sequence.target)
        older = [other for other in self._waiting if other.order < sequence.order]
        self._waiting.insert(len(older), sequence)
        self._starved_room = None

    def _recount(self, sequence: SimSequence, tokens: int) -> None:
        self.pending_tokens += tokens - sequence.pending_tokens
        sequence.pending_tokens = tokens

    # -- progress -------------------------------------------------------------------------------

    def _advance(
        self, sequence: SimSequence, tokens: int, ended: StepsEnded, *, now: float
    ) -> None:
        """Count a chunk as computed; the one that ends the prefill samples a token."""
        sequence.position += tokens
        sequence.computed_tokens += tokens
        left = sequence.target - sequence.position
        self._recount(sequence, left)
        self._tell(sequence, sequence.position // self._unit, now)
        if left > 0:
            return
        self.prefilling.remove(sequence)
        sequence.left -= 1
        if sequence.first_token_s < 0.0:
            sequence.first_token_s = now
            ended.began.append(sequence)
        if sequence.left:
            self.decoding.append(sequence)
            self._context += sequence.position
        else:
            ended.done.append(sequence)

    def _tell_in_order(
        self, full: list[tuple[int, int, SimSequence]], steps: int, now: float
    ) -> None:
        """Tell the cache of the units that were filled in a fold, each at its time, since what is
        older goes first. `full` holds (step of the fold, place in the batch, whose unit was then
        full)."""
        full.sort()
        whole_ms = self._duration_ms(steps)
        for step, _, sequence in full:
            at = now if step >= steps else now - (whole_ms - self._duration_ms(step)) / 1000.0
            self._tell(sequence, sequence.told + 1, at)

    def _tell(self, sequence: SimSequence, upto: int, now: float) -> None:
        """Tell the cache of the units up to `upto`, keeping point state on the way."""
        upto = min(upto, sequence.reserved)
        if upto <= sequence.told:
            return
        if self._has_points:
            for stop in self._stops(sequence, upto):
                self._seal(sequence, stop, now)
                if stop >= sequence.write_floor:
                    self.cache.snapshot(sequence.turn_id, now)
        self._seal(sequence, upto, now)

    def _seal(self, sequence: SimSequence, upto: int, now: float) -> None:
        if upto > sequence.told:
            ids = sequence.units[sequence.told * TOKEN_BYTES : upto * TOKEN_BYTES]
            self.cache.advance(sequence.turn_id, ids, now)
            sequence.told = upto

    def _stops(self, sequence: SimSequence, upto: int) -> list[int]:
        """Return the boundaries in (told, upto] at which state is kept, as the reference engine's
        grid has them: the prompt's last two, those a policy names, and while decoding the
        latest."""
        block, unit = self._block, self._unit
        wanted = {
            (sequence.target - 1) // unit // block * block,
            sequence.target // unit // block * block,
            *sequence.checkpoints,
        }
        if upto * unit > sequence.target or sequence.turn_id in self._at_risk:
            self._at_risk.discard(sequence.turn_id)
            wanted.add(upto // block * block)
        return sorted(at for at in wanted if sequence.told < at <= upto)

    # -- self-checks ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantViolated unless cache, queue and counts agree."""
        self.cache.check()
        inside = {s.turn_id for s in (*self.prefilling, *self.decoding)}
        if inside != set(self.cache.running):
            raise InvariantViolated("the cache runs other turns than the engine")
        queue = [sequence.order for sequence in self._waiting]
        if queue != sorted(queue):
            raise InvariantViolated("the queue is not oldest first")
        pending = sum(s.pending_tokens for s in (*self._waiting, *self.prefilling))
        if pending != self.pending_tokens:
            raise InvariantViolated(f"{self.pending_tokens} pending tokens counted, not {pending}")
