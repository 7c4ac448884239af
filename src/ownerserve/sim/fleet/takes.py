"""Takes bring an idle session to another worker, or a read-only replica of its beginning, between
turns: T's side of a production node, over modelled links.

    gateway ── Take ──> T ── AskSession ──> S   production's LeavingSessions, between two steps
                        T <══ transfers ═══ S   sim.transfer: lends, control
                        T ── HandOver ───> S    LeavingSessions, the directory: compare-and-set
    gateway <── SessionTaken T                  installed: idle here, as if its turn had ended

    gateway ── TakePrefix ──> T ── AskTokens ──> S     nobody's ownership changes
    gateway <── PrefixTaken   T <══ transfers ══ S

The production counterparts are node.transfers.moves.Takes and .replicas.PrefixTakes, which asyncio
runs: the same questions, rounds and waits. S's side is production's own class. Owns the takes under
way; who owns a session is the directory's word.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import msgspec

from ownerserve.cache.outcomes import Install
from ownerserve.cache.sessions import restorable_tokens
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix, Packed
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskSession,
    HandOver,
    Moved,
    PrefixTaken,
    Reject,
    RpcAnswer,
    SessionStands,
    SessionTaken,
    TokensAre,
)
from ownerserve.node.restore.coming import ANY_TOKEN
from ownerserve.node.transfers.lending import tokens_to_lend
from ownerserve.node.transfers.moves import ROUNDS, SETTLES_S
from ownerserve.node.transfers.state_brings import ANSWER_S
from ownerserve.node.vocabulary.events import PrefixCame, SessionCame
from ownerserve.sim.fleet.leaving import leaving_from
from ownerserve.sim.fleet.ownership import SimOwnership
from ownerserve.sim.storage.unit_names import UnitChain
from ownerserve.sim.timeline.heap import Call, TimedCall
from ownerserve.sim.transfer.outcomes import TransferOutcome, TransferResult
from ownerserve.sim.transfer.transfers import Transfers
from ownerserve.sim.worker.worker import SimWorker

NO_ANSWER = "no_answer"
Taken = SessionTaken | PrefixTaken | Reject | str
Ended = Callable[[Taken, float], None]
"""Hears at the target what came of a take. What was taken is counted in tokens."""

_BROUGHT = (TransferOutcome.LANDED, TransferOutcome.NOTHING_TO_BRING)
_AGAIN = (
    Reject(WorkerRefusal.STALE_VERSION),
    Reject(WorkerRefusal.SESSION_IS_RUNNING),
)


class _Take(msgspec.Struct, eq=False):
    """A take is of a session that is to come from one life of a worker to one of another. Of a
    replica, `units` of its beginning. `asked` counts its questions: who answers an earlier one is
    not heard. `moved_bytes` came for it."""

    session: SessionId
    source: SimWorker
    target: SimWorker
    lives: tuple[RoutingUnit, RoutingUnit]
    ended: Ended
    units: int | None = None
    rounds: int = 0
    asked: int = 0
    moved_bytes: int = 0
    tokens: Packed = b""
    stands: SessionStands | None = None
    mourner: Call | None = None
    timer: TimedCall | None = None
    is_over: bool = False


class SimTakes:
    """The takes of one fleet. `moved_bytes` came for those that have ended."""

    def __init__(self, transfers: Transfers, ownership: SimOwnership) -> None:
        self.moved_bytes = 0
        self._transfers = transfers
        self._network = transfers.network
        self._heap = transfers.network.heap
        self._ownership = ownership
        self._under_way: dict[tuple[RoutingUnit, SessionId], _Take] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def take(
        self, session: SessionId, source: SimWorker, target: SimWorker, *, ended: Ended, now: float
    ) -> None:
        """Have `target` take the idle session over from `source`; `ended` is called later."""
        self._begin(session, source, target, ended=ended, units=None, now=now)

    def copy(
        self,
        session: SessionId,
        source: SimWorker,
        target: SimWorker,
        *,
        units: int,
        ended: Ended,
        now: float,
    ) -> None:
        """Have `target` bring the first units of what `source` has of the session; `ended` is
        called later."""
        self._begin(session, source, target, ended=ended, units=units, now=now)

    def _begin(
        self,
        session: SessionId,
        source: SimWorker,
        target: SimWorker,
        *,
        ended: Ended,
        units: int | None,
        now: float,
    ) -> None:
        key = target.unit, session
        refused: Taken | None = None
        if not target.is_up:
            refused = NO_ANSWER
        elif key in self._under_way:
            refused = Reject(WorkerRefusal.SESSION_IS_MOVING)
        if refused is not None:
            self._heap.at(now, partial(ended, refused))
            return
        take = _Take(session, source, target, (source.unit, target.unit), ended, units)
        self._under_way[key] = take
        take.mourner = partial(self._end, take, NO_ANSWER)
        target.mourners.append(take.mourner)
        self._round(take, now)

    # -- a question to the source ---------------------------------------------------------------

    def _ask(
        self,
        take: _Take,
        answer: Callable[[Callable[[RpcAnswer], None], float], None],
        heard: Callable[[_Take, RpcAnswer, float], None],
        now: float,
    ) -> None:
        """Ask the source; `answer` is called there, between two steps, with whom to tell."""
        take.asked += 1
        number, source, target = take.asked, take.source, take.target
        take.timer = self._heap.at(now + ANSWER_S, partial(self._silent, take))

        def asked(at_s: float) -> None:
            if source.is_up and source.unit == take.lives[0]:
                source.between_steps(partial(answer, back), at_s)

        def back(said: RpcAnswer) -> None:
            self._network.say(source.host, target.host, partial(here, said), self._heap.now)

        def here(said: RpcAnswer, at_s: float) -> None:
            if take.is_over or take.asked != number:
                return
            take.asked += 1
            if take.timer is not None:
                take.timer.cancel()
            heard(take, said, at_s)

        self._network.say(target.host, source.host, asked, now)

    def _silent(self, take: _Take, now: float) -> None:
        stands = take.stands
        if stands is not None and stands.epoch is not None:  # it may be ours
            self._may_be_ours(take, None, now)
        self._end(take, Reject(WorkerRefusal.NO_ANSWER), now)

    # -- where it stands, and what is there of it ----------------------------------------------

    def _round(self, take: _Take, now: float) -> None:
        """Ask what is to be brought."""
        if take.is_over:
            return
        take.rounds += 1
        take.stands = None
        if take.units is None:
            self._ask(take, partial(self._stands, take), self._stood, now)
        else:
            self._ask(take, partial(self._tokens, take), self._told, now)

    def _stands(self, take: _Take, back: Callable[[RpcAnswer], None], now: float) -> None:
        leaving = leaving_from(take.source, self._ownership)
        back(leaving.stands(AskSession(take.session)))

    def _stood(self, take: _Take, said: RpcAnswer, now: float) -> None:
        if not isinstance(said, SessionStands):
            self._end(take, _refusal(said), now)
            return
        take.stands = said
        self._bring(take, said.tokens, now)

    def _tokens(self, take: _Take, back: Callable[[RpcAnswer], None], now: float) -> None:
        assert take.units is not None
        block = take.source.cache.layout.block_tokens
        most = take.units // block * block * TOKEN_BYTES
        tokens = tokens_to_lend(take.source.cache, take.session)[:most]
        back(TokensAre(tokens) if tokens else Reject(WorkerRefusal.UNKNOWN_SESSION))

    def _told(self, take: _Take, said: RpcAnswer, now: float) -> None:
        if isinstance(said, TokensAre):
            self._bring(take, said.tokens, now)
        else:
            self._end(take, _refusal(said), now)

    def _bring(self, take: _Take, tokens: Packed, now: float) -> None:
        """Have the whole blocks of it come."""
        block_bytes = take.target.cache.layout.packed_block_bytes
        take.tokens = tokens[: len(tokens) // block_bytes * block_bytes]
        if not take.tokens and take.units is None:
            self._hand(take, now)
            return
        then = partial(self._came, take)
        text = take.tokens + ANY_TOKEN
        self._transfers.bring(take.source, take.target, text, then=then, now=now)

    def _came(self, take: _Take, brought: TransferResult, now: float) -> None:
        self.moved_bytes += brought.bytes
        take.moved_bytes += brought.bytes
        if take.is_over:
            return
        is_here = brought.landing in _BROUGHT
        if take.units is None and not is_here:
            assert take.stands is not None
            is_here = self._restorable(take) >= take.stands.restorable_tokens
        if not is_here:
            self._end(take, Reject(WorkerRefusal.NOT_BROUGHT), now)
        elif take.units is None:
            self._hand(take, now)
        else:
            take.target.between_steps(partial(self._copied, take), now)

    def _restorable(self, take: _Take) -> int:
        """Return how many of its units a turn could go on from at the target."""
        points = take.target.cache.match(take.tokens + ANY_TOKEN).points
        return max((point.position for point in points if not point.lacks), default=0)

    # -- whose it is ---------------------------------------------------------------------------

    def _hand(self, take: _Take, now: float) -> None:
        """Ask the owner to hand it over."""
        self._ask(take, partial(self._hands_over, take), self._handed, now)

    def _hands_over(self, take: _Take, back: Callable[[RpcAnswer], None], now: float) -> None:
        assert take.stands is not None
        answer: Future[RpcAnswer] = Future()
        answer.add_done_callback(lambda done: back(done.result()))
        asked = HandOver(take.session, take.stands.version, take.lives[1], take.stands.epoch)
        leaving_from(take.source, self._ownership).hand_over(asked, answer)

    def _handed(self, take: _Take, said: RpcAnswer, now: float) -> None:
        if isinstance(said, Moved):
            take.target.between_steps(partial(self._install, take, said), now)
        elif said in _AGAIN and take.rounds < ROUNDS:
            self._heap.at(now + SETTLES_S, partial(self._round, take))
        elif said == Reject(WorkerRefusal.NO_ANSWER):
            self._silent(take, now)
        else:
            self._end(take, _refusal(said), now)

    def _install(self, take: _Take, moved: Moved, now: float) -> None:
        """Make the session the target's, as its owners left it, unless a turn of it is here that
        went further."""
        assert take.stands is not None
        target, stands = take.target, take.stands
        if moved.epoch is not None:
            self._may_be_ours(take, moved.epoch, now)
        hashed = _hashed(target, take.tokens)
        known = target.cache.sessions.get(take.session)
        is_whole = len(take.tokens) == stands.sealed_tokens * TOKEN_BYTES > 0
        if is_whole and not (known is not None and known.sealed > len(hashed.digests)):
            version = max(1, stands.version)
            there = Install(take.session, version, take.tokens, moved.open_tokens)
            if target.cache.install(there, now) is None:
                target.machine.node.handle(SessionCame(take.session, hashed), now)
        taken = SessionTaken(stands.version, self._depth(take), moved.epoch)
        self._end(take, taken, now)

    def _may_be_ours(self, take: _Take, epoch: Epoch | None, now: float) -> None:
        """Have the target ask the directory whose the session is."""
        node = self._ownership.nodes.get(take.lives[1])
        if node is not None:
            node.moved_here(take.session, epoch, now)

    def _copied(self, take: _Take, now: float) -> None:
        """Have the replica told of, unless the session's own turns left more here."""
        target = take.target
        sessions, hashed = target.cache.sessions, _hashed(target, take.tokens)
        known = sessions.get(take.session)
        is_served_here = known is not None and (known.version > 0 or known.running > 0)
        is_further = known is not None and known.depth >= len(hashed.digests)
        if not is_served_here and not is_further:
            there = Install(take.session, 1, hashed.tokens, b"", hashed.digests[-1])
            if target.cache.install(there, now) is None:
                sessions.let_go(take.session)  # it goes on elsewhere
                target.machine.node.handle(PrefixCame(take.session, hashed), now)
        tokens = self._depth(take)
        taken = PrefixTaken(tokens, take.moved_bytes) if tokens else None
        self._end(take, taken or Reject(WorkerRefusal.NOT_BROUGHT), now)

    def _depth(self, take: _Take) -> int:
        """Return how many tokens of the session a turn could go on from at the target."""
        target = take.target
        known = target.cache.sessions.get(take.session)
        return restorable_tokens(known, target.cache.layout) * target.unit_tokens

    def _end(self, take: _Take, said: Taken, now: float) -> None:
        if take.is_over:
            return
        take.is_over = True
        if take.timer is not None:
            take.timer.cancel()
        del self._under_way[take.lives[1], take.session]
        if take.mourner in take.target.mourners:
            take.target.mourners.remove(take.mourner)
        take.ended(said, now)


def _hashed(worker: SimWorker, tokens: Packed) -> HashedPrefix:
    """Return units with the digests of their blocks, as the worker's node makes them."""
    hashed = HashedPrefix(worker.cache.layout.block_tokens, chain=UnitChain)
    hashed.grow(tokens)
    return hashed


def _refusal(said: RpcAnswer) -> Reject:
    return said if isinstance(said, Reject) else Reject(WorkerRefusal.NO_ANSWER)
