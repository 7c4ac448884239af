"""Options are the ways back to its state that are open to one query; each is priced here.

    option       range kept        state from             computed
    restore      [0, B)            the point at B         [B, N)
    replay       [0, B)            nothing                [B - R, B) again, [B, N)
    replay       [0, B)            a point at c < B       [c, B) again, [B, N)
    bounded      [0, B)            nothing                [B - W, B) again, [B, N): approximate
    prefill      nothing           nothing                [0, N)

`restore_options` lists all of them, for explaining and for tests; plan.restore finds the cheapest
without listing. Both price with `OptionPricer`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ownerserve.kv.messages import RestoreAction, Tier
from ownerserve.kv.units import GIB
from ownerserve.plan.cost.prices import Coefficients, Prices
from ownerserve.plan.inputs import (
    Abilities,
    Exactness,
    ModelState,
    Overlap,
    Piece,
    Point,
    RestoreQuery,
)
from ownerserve.plan.load_cost import LoadBytes, LoadPricer, load_bytes_until, share
from ownerserve.plan.outcome import NotOffered, Priced, Step, Terms, Why
from ownerserve.plan.rules import (
    device_hit,
    why_no_bounded_replay,
    why_no_replay,
    why_not_one_length,
    why_out_of_reach,
)


class RestoreOption(msgspec.Struct, frozen=True, gc=False):
    """An option is one way back to a turn's state, from the point state at `checkpoint`; None: from
    none.
    """

    position: int
    start: int
    checkpoint: Point | None
    exactness: Exactness = Exactness.EXACT


PREFILL_ALL = RestoreOption(0, 0, None)


def pass_ms(
    prefill: Coefficients, replay: Coefficients, option: RestoreOption, tokens: int
) -> float:
    """Return the compute time of an option. Replay and prefill are one pass with one fixed cost."""
    again, new = option.position - option.start, tokens - option.position
    ms = prefill.a_ms + new * (prefill.b_ms + prefill.c_ms * (option.position + 0.5 * new))
    if again > 0:
        ms += again * (replay.b_ms + replay.c_ms * (option.start + 0.5 * again))
        ms += max(0.0, replay.a_ms - prefill.a_ms)
    return ms


class OptionPricer:
    """An option pricer prices single options in full, for one engine, query and moment."""

    def __init__(
        self,
        model: ModelState,
        abilities: Abilities,
        *,
        query: RestoreQuery,
        prices: Prices,
        load_pricer: LoadPricer,
    ) -> None:
        """Make the pricer; `load_pricer` is of the same prices, abilities and query."""
        self._model = model
        self._query = query
        self._prices = prices
        self._load_pricer = load_pricer
        self._stages = stages(model, abilities)
        self.queue_ms = prices.queue_ms(query.backlog)
        self.load_from_ms = 0.0 if abilities.can_reserve else self.queue_ms

    def _terms(self, option: RestoreOption, loads: LoadBytes, hbm_bytes: int) -> Terms:
        """Return the price by term (picture: plan.outcome).

        With a load of l ms in S stages beside c ms of compute, stage i of compute waits for stage i
        of the load: compute may begin after l / S, and ends no earlier than c / S after the load.
        """
        load = self._load_pricer.ms(loads)
        if option.checkpoint is not None:
            load += self._load_pricer.point_ms(option.checkpoint.pieces)
        compute = pass_ms(self._prices.prefill, self._prices.replay, option, self._query.tokens)
        begin = max(self.queue_ms, self.load_from_ms + load / self._stages)
        end = max(begin + compute, self.load_from_ms + load + compute / self._stages)
        exposed = end - self.queue_ms - compute
        return Terms(
            self.queue_ms,
            begin - self.queue_ms,
            compute,
            max(0.0, end - begin - compute),
            self._query.hbm_ms_per_gib * hbm_bytes / GIB,
            max(0.0, load - exposed),
        )

    def _new_hbm_bytes(self, option: RestoreOption, moved_bytes: int) -> int:
        """Count the bytes of device memory that the option newly occupies: all of [0, N) but what
        it shares.
        """
        tokens = self._query.tokens - option.position
        own = self._model.range_bytes_per_token * tokens + self._model.point_bytes
        return int(own) + moved_bytes

    def priced(self, option: RestoreOption) -> Priced:
        """Return `option` with its terms and its steps in order."""
        loads = load_bytes_until(self._query.spans, option.position)
        moved = loads.moved_bytes
        hbm_bytes = self._new_hbm_bytes(option, moved)
        at = None
        steps = self._loads(option)
        if option.checkpoint is not None:
            moved += sum(p.bytes for p in option.checkpoint.pieces if p.tier is not Tier.DEVICE)
            at = option.checkpoint.position
        steps += self._computes(option)
        return Priced(
            option.position,
            option.start,
            at,
            option.exactness,
            self._terms(option, loads, hbm_bytes),
            tuple(steps),
            self._query.tokens - option.start,
            moved,
            hbm_bytes,
        )

    def _loads(self, option: RestoreOption) -> list[Step]:
        """List loads in order: range state from 0 on, neighbours of one tier joined, then the
        point.
        """
        steps: list[Step] = []
        for span in self._query.spans:
            if span.start >= option.position:
                break
            end = min(span.end, option.position)
            for piece in span.pieces:
                count = share(piece, end - span.start, span.end - span.start)
                last = steps[-1] if steps else None
                if last is not None and last.tier is piece.tier and last.end == span.start:
                    count += last.bytes
                    steps.pop()
                    begin = last.start
                else:
                    begin = span.start
                steps.append(self._load_step(RestoreAction.LOAD_GLOBAL, piece, count, (begin, end)))
        if option.checkpoint is not None:
            at = option.checkpoint.position
            steps += [
                self._load_step(RestoreAction.LOAD_POINT, piece, piece.bytes, (at, at))
                for piece in option.checkpoint.pieces
            ]
        return steps

    def _load_step(
        self, action: RestoreAction, piece: Piece, count: int, tokens: tuple[int, int]
    ) -> Step:
        table = self._load_pricer.tables.get(piece.tier)
        ms = piece.ready_ms + (table.ms(count) if table is not None else 0.0)
        return Step(action, *tokens, ms=ms, tier=piece.tier, bytes=count)

    def _computes(self, option: RestoreOption) -> list[Step]:
        """List computes in order: what is replayed, the tail that was computed once, what is
        new.
        """
        prefill, replay, n = self._prices.prefill, self._prices.replay, self._query.tokens
        known = min(self._query.known_tokens, n)
        is_tail = option.position < known < option.position + self._model.block_tokens
        tail_end = known if is_tail and option.position > 0 else option.position
        parts = [
            (RestoreAction.REPLAY, option.start, option.position, replay),
            (RestoreAction.RECOMPUTE_TAIL, option.position, tail_end, prefill),
            (RestoreAction.PREFILL, tail_end, n, prefill),
        ]
        steps = []
        for action, start, end, cost in parts:
            if end > start:
                ms = (end - start) * (cost.b_ms + cost.c_ms * (start + 0.5 * (end - start)))
                steps.append(Step(action, start, end, ms))
        return steps


def stages(model: ModelState, abilities: Abilities) -> int:
    """Count the stages in which a load and the compute that needs it can be interleaved."""
    return model.layers if abilities.overlap is Overlap.LAYERWISE else 1


def restore_options(
    model: ModelState,
    abilities: Abilities,
    *,
    query: RestoreQuery,
    covered: int,
    load_pricer: LoadPricer,
) -> Iterator[RestoreOption | NotOffered]:
    """Iterate over every option that may be offered, and for every other one why it is not."""
    no_replay = why_no_replay(model, abilities)
    no_bounded = why_no_bounded_replay(model, abilities, query)
    hit = None if abilities.per_group_hit else device_hit(query)
    for i, point in enumerate(query.points):
        at = point.position
        out = why_out_of_reach(at, query, covered)
        if out is not None:
            yield NotOffered(at, RestoreAction.LOAD_GLOBAL, out)
            continue
        why = _why_no_restore(point, load_pricer)
        if why is None and hit is not None:
            why = why_not_one_length(model, query, point, hit=hit)
        yield (
            RestoreOption(at, at, point)
            if why is None
            else NotOffered(at, RestoreAction.LOAD_POINT, why)
        )
        if model.point_bytes == 0:
            continue
        if no_replay is not None:
            yield NotOffered(at, RestoreAction.REPLAY, no_replay)
            continue
        assert model.exact_replay_tokens is not None
        start = max(0, at - model.exact_replay_tokens)
        yield RestoreOption(at, start, None)
        yield from (
            RestoreOption(at, earlier.position, earlier)
            for earlier in query.points[i + 1 :]
            if earlier.position > start and _why_no_restore(earlier, load_pricer) is None
        )
        if no_bounded is None and model.bounded_replay_tokens is not None:
            if at > model.bounded_replay_tokens:
                bounded = at - model.bounded_replay_tokens
                yield RestoreOption(at, bounded, None, Exactness.BOUNDED_REPLAY)
        elif no_bounded is Why.APPROXIMATE_NOT_ASKED:
            yield NotOffered(at, RestoreAction.REPLAY, no_bounded)
    yield PREFILL_ALL


def _why_no_restore(point: Point, load_pricer: LoadPricer) -> Why | None:
    if point.lacks:
        return Why.POINT_STATE_MISSING
    return None if load_pricer.has_price(point.pieces) else Why.NO_MEDIUM
