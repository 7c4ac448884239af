"""What a directory is told of an inventory: names, tiers and kinds, once each, and all anew when it
has forgotten. Over a real inventory and a real directory, without threads."""

from __future__ import annotations

import random
from collections import Counter
from enum import Enum, auto

import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rules import MAIN_KINDS, StateKind, TierCode
from ownerserve.directory.terms import TermFile
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Tier
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.publishing import PART, Publishing, extent_name
from ownerserve.node.vocabulary.chains import Chains

BLOCK = 16
UNIT = RoutingUnit(WorkerId("w"), 0, Incarnation(1))
OTHER = RoutingUnit(WorkerId("x"), 0, Incarnation(1))
S, F = SessionId("s"), SessionId("fork")
ALL = MAIN_KINDS | int(StateKind.CHECKPOINT)
TIERS = {Tier.DEVICE: TierCode.DEVICE, Tier.HOST: TierCode.HOST, Tier.DISK: TierCode.DISK}


class Answer(Enum):
    """What comes of a frame."""

    HEARD = auto()
    LOST = auto()  # the directory did it
    NONE = auto()  # the directory never had it


class Worker:
    """An inventory, the chains of its sessions, and a directory that is told."""

    def __init__(self, *, gone_kept: int = 4096, has_kept: int = 16_384) -> None:
        self.directory = EmbeddedDirectory(ManualClock(1000.0), TermFile(), opens_in_s=0.0)
        self.inventory = Inventory(gone_kept=gone_kept, has_kept=has_kept)
        self.chains = Chains(BLOCK, block_bytes=4 * BLOCK)
        self.publishing = Publishing(
            UNIT, self.inventory, scope=bytes(32), digest_at=lambda session, tokens: (
                self.chains.digest_at(session, tokens // BLOCK)
            ),
        )  # fmt: skip
        self.ours: set[SessionId] = set()
        self.sent: list[ask.Publish] = []
        self.duty: Epoch | None = None
        self.ask(ask.Register(UNIT))
        self.ask(ask.Register(OTHER))

    def ask(self, request: ask.Request) -> ask.Outcome:
        (outcome,) = self.directory.execute([request])
        return outcome

    def name(self, blocks: int, branch: int = 0, tenant: bytes = b"") -> PrefixHash:
        return extent_name(bytes(32), hash_prefix(text(blocks, branch), BLOCK)[-1], tenant)

    def has(
        self, session: SessionId, place: Tier, blocks: int, *, branch: int = 0, kinds: int = ALL
    ) -> None:
        digests = self.chains.digests(text(blocks, branch), session)
        self.inventory.has(session, place, blocks * BLOCK, digest=digests[-1], kinds=kinds)

    def tell(
        self, busy: tuple[SessionId, ...] = (), answer: Answer = Answer.HEARD
    ) -> ask.Publish | None:
        """What goes with one frame."""
        told = self.publishing.next(seen=None, ours=self.ours, busy=busy)
        if told is not None:
            self.sent.append(told)
            nothing = ask.Refused(ask.DirectoryRefusal.UNREACHABLE)
            outcome = nothing if answer is Answer.NONE else self.ask(told)
            self.publishing.answered(outcome if answer is Answer.HEARD else nothing)
        return told

    def tell_all(self) -> None:
        while self.tell() is not None:
            pass

    def advance(self, session: SessionId, version: int, blocks: int, *, branch: int = 0) -> None:
        """A finished turn of a session that is this worker's."""
        bound = self.ask(ask.Bind(session, UNIT))
        assert isinstance(bound, ask.Bound)
        self.chains.digests(text(blocks, branch), session)
        name = self.name(blocks, branch)
        told = ask.Advance(session, UNIT, bound.epoch, version, name, blocks * BLOCK)
        outcome = self.ask(told)
        assert isinstance(outcome, ask.Advanced)
        self.publishing.claimed(told, outcome.duty)
        self.ours.add(session)
        self.duty = outcome.duty

    def copies(self, name: PrefixHash) -> dict[TierCode, int]:
        """This unit's, as the directory knows them."""
        found = self.ask(ask.Lookup((name,)))
        places = found.locations if isinstance(found, ask.Found) else ()
        return {tier: kinds for unit, tier, kinds in places if unit == UNIT}


def text(blocks: int, branch: int = 0) -> bytes:
    """Tokens of so many blocks; a branch differs from its second block on."""
    return pack([*range(BLOCK), *range(1000 * branch + BLOCK, 1000 * branch + blocks * BLOCK)])


def test_what_is_held_is_told_once_by_name_tier_and_kinds() -> None:
    worker = Worker()
    worker.ours = {S}
    worker.has(S, Tier.DEVICE, 3)
    worker.has(S, Tier.DISK, 2, kinds=MAIN_KINDS)
    worker.tell_all()
    assert worker.copies(worker.name(3)) == {TierCode.DEVICE: ALL}
    assert worker.copies(worker.name(2)) == {TierCode.DISK: MAIN_KINDS}
    assert len(worker.sent) == 1 and worker.tell() is None


def test_a_guest_tells_of_point_state_only_at_rest() -> None:
    worker = Worker()
    worker.has(S, Tier.DEVICE, 3)
    worker.has(S, Tier.DISK, 3)
    worker.tell_all()
    assert worker.copies(worker.name(3)) == {TierCode.DEVICE: MAIN_KINDS, TierCode.DISK: ALL}
    purely_recurrent = int(StateKind.CHECKPOINT)
    worker.has(F, Tier.DEVICE, 4, kinds=purely_recurrent)
    worker.tell_all()
    assert worker.copies(worker.name(4)) == {}


def test_what_a_finished_turn_told_is_not_told_again() -> None:
    worker = Worker()
    for version, blocks in enumerate((2, 3, 5), start=1):
        worker.has(S, Tier.DEVICE, blocks, kinds=MAIN_KINDS)
        worker.tell(busy=(S,))
        worker.advance(S, version, blocks)
    worker.tell_all()
    assert not any(told.extents for told in worker.sent)
    assert worker.copies(worker.name(5)) == {TierCode.DEVICE: MAIN_KINDS}
    assert worker.copies(worker.name(3)) == worker.copies(worker.name(2)) == {}


def test_a_fork_keeps_what_its_parent_went_on_from_until_that_is_evicted() -> None:
    worker = Worker()
    worker.advance(S, 1, 2)
    worker.has(S, Tier.DEVICE, 2, kinds=MAIN_KINDS)
    worker.ask(ask.Bind(F, OTHER, parent=S))
    worker.tell_all()
    worker.advance(S, 2, 4)
    worker.has(S, Tier.DEVICE, 4, kinds=MAIN_KINDS)
    worker.tell_all()
    assert worker.copies(worker.name(2)) == {TierCode.DEVICE: MAIN_KINDS}
    worker.inventory.gone(S, Tier.DEVICE)
    worker.tell_all()
    assert worker.copies(worker.name(2)) == worker.copies(worker.name(4)) == {}
    assert worker.publishing.lost_copies == 2, "the session stands on one, its fork on the other"


def test_an_edited_history_is_gone_and_not_gone_on_from() -> None:
    worker = Worker()
    worker.advance(S, 1, 4)
    worker.has(S, Tier.DEVICE, 4, kinds=MAIN_KINDS)
    worker.ask(ask.Bind(F, OTHER, parent=S))
    worker.tell_all()
    worker.advance(S, 2, 5, branch=1)
    worker.has(S, Tier.DEVICE, 5, branch=1, kinds=MAIN_KINDS)
    worker.tell_all()
    assert worker.copies(worker.name(4)) == {}
    assert worker.copies(worker.name(5, branch=1)) == {TierCode.DEVICE: MAIN_KINDS}
    assert worker.publishing.lost_copies == 1


def test_two_sessions_on_one_prefix_are_one_copy() -> None:
    worker = Worker()
    worker.ours = {S, F}
    for session in (S, F):
        worker.has(session, Tier.DEVICE, 2)
    worker.tell_all()
    worker.inventory.gone(S, Tier.DEVICE)
    worker.tell_all()
    assert worker.copies(worker.name(2)) == {TierCode.DEVICE: ALL}
    worker.inventory.gone(F, Tier.DEVICE)
    worker.tell_all()
    assert worker.copies(worker.name(2)) == {}


def test_a_directory_that_forgot_is_told_all_with_duties_and_groups() -> None:
    worker = Worker()
    worker.publishing.belongs(S, group="repo")
    worker.has(S, Tier.DEVICE, 3, kinds=MAIN_KINDS)
    worker.advance(S, 1, 3)
    for number in range(2 * PART):
        worker.has(SessionId(f"t{number}"), Tier.HOST, 2, branch=number + 1)
    worker.tell_all()
    worker.directory.forget()
    worker.ask(ask.Register(UNIT))
    worker.publishing.forgotten()
    worker.sent.clear()
    assert worker.publishing.has_backlog
    worker.tell_all()
    assert not worker.publishing.has_backlog
    assert [len(told.extents) for told in worker.sent] == [PART, PART, 1]
    after = worker.ask(ask.Lookup((worker.name(3),)))
    assert isinstance(after, ask.Found)
    assert (after.owner, after.group) == (UNIT, "repo")
    duties = {one.epoch for told in worker.sent for one in told.extents if one.epoch is not None}
    assert duties == {worker.duty}
    records = worker.directory.status().records
    assert records is not None and records.prefixes == len(worker.publishing) == 2 * PART + 1
    assert worker.ask(ask.FindGroup("repo")) == ask.GroupIs(((worker.name(3), 0),))


def test_what_went_before_it_was_known_that_the_directory_had_forgotten_is_told_as_gone() -> None:
    """A `Register` that was stuck on its way makes the unit known to the new memory at once."""
    worker = Worker()
    worker.directory.forget()
    worker.ask(ask.Register(UNIT))
    worker.has(S, Tier.DISK, 2)
    worker.has(F, Tier.DISK, 3)
    worker.tell_all()
    worker.inventory.gone(S, Tier.DISK)
    assert worker.publishing.next(seen=None, ours=(), busy=()) is not None
    worker.publishing.answered(ask.Refused(ask.DirectoryRefusal.UNREACHABLE))
    worker.has(F, Tier.DISK, 4)
    worker.publishing.forgotten()
    worker.tell_all()
    known = [worker.copies(worker.name(blocks)) for blocks in (2, 3, 4)]
    assert known == [{}, {}, {TierCode.DISK: ALL}]


def test_what_the_directory_did_not_take_goes_again_with_a_later_frame() -> None:
    worker = Worker()
    worker.has(S, Tier.DISK, 2)
    told = worker.publishing.next(seen=None, ours=(), busy=())
    worker.publishing.answered(ask.Refused(ask.DirectoryRefusal.UNREACHABLE))
    assert not worker.publishing.has_backlog, "it does not spin"
    assert worker.publishing.next(seen=None, ours=(), busy=()) == told
    worker.tell_all()
    assert worker.copies(worker.name(2)) == {TierCode.DISK: ALL}


def test_a_digest_that_is_learnt_a_moment_later_is_not_missed() -> None:
    worker = Worker()
    worker.inventory.has(S, Tier.DEVICE, 3 * BLOCK, digest=None, kinds=MAIN_KINDS)
    assert worker.tell() is None
    worker.chains.digests(text(3), S)
    worker.tell_all()
    assert worker.copies(worker.name(3)) == {TierCode.DEVICE: MAIN_KINDS}


def test_equal_tokens_of_two_tenants_are_two_prefixes() -> None:
    worker = Worker()
    mine, theirs = (bytes([number]) * 32 for number in (1, 2))
    digest = worker.chains.digests(text(3), S)[-1]
    for session, tenant in ((S, mine), (F, theirs)):
        worker.inventory.has(
            session, Tier.DISK, 3 * BLOCK, digest=digest, kinds=MAIN_KINDS, tenant=tenant
        )
    worker.tell_all()
    names = [worker.name(3, tenant=tenant) for tenant in (mine, theirs)]
    assert [worker.copies(one) for one in names] == [{TierCode.DISK: MAIN_KINDS}] * 2
    assert worker.copies(worker.name(3)) == {} and len(set(names)) == 2
    worker.inventory.gone(F, Tier.DISK)
    worker.tell_all()
    assert [worker.copies(one) for one in names] == [{TierCode.DISK: MAIN_KINDS}, {}]


def test_words_that_were_missed_are_made_good() -> None:
    worker = Worker(gone_kept=2)
    names = [SessionId(f"s{number}") for number in range(5)]
    for number, session in enumerate(names):
        worker.has(session, Tier.DISK, 2, branch=number + 1)
    worker.tell_all()
    for session in names[:4]:
        worker.inventory.gone(session, Tier.DISK)
    worker.tell_all()
    known = [worker.copies(worker.name(2, branch=number + 1)) for number in range(5)]
    assert known == [{}, {}, {}, {}, {TierCode.DISK: ALL}]


def test_who_leaves_asks_first_and_hears_what_is_the_last_copy() -> None:
    worker = Worker()
    worker.advance(S, 1, 3)
    worker.has(S, Tier.DISK, 3, kinds=MAIN_KINDS)
    worker.has(F, Tier.HOST, 5, branch=1)
    worker.tell_all()
    (drops,) = worker.publishing.leaving()
    outcomes = Counter(type(one).__name__ for one in worker.directory.execute(drops))
    assert outcomes == {"Dropped": 2, "Refused": 1}


@pytest.mark.parametrize("seed", range(30))
def test_the_directory_knows_what_the_inventory_says(seed: int) -> None:
    """Whatever came and went, in whatever order it was told: kinds, tiers and names agree, but for
    former tips that forks stand on."""
    rng = random.Random(seed)
    worker = Worker(gone_kept=rng.choice((3, 4096)), has_kept=rng.choice((9, 16_384)))
    sessions = [SessionId(f"s{number}") for number in range(6)]
    worker.ours = set(sessions)
    held: dict[tuple[str, str], PrefixHash] = {}
    for _ in range(rng.randrange(1, 120)):
        session, place = rng.choice(sessions), rng.choice(list(TIERS))
        roll = rng.random()
        if roll < 0.6:
            blocks, branch = rng.randrange(1, 9), rng.randrange(3)
            worker.has(session, place, blocks, branch=branch)
            held[session, place.value] = worker.name(blocks, branch)
        elif roll < 0.8:
            worker.inventory.gone(session, place)
        elif roll < 0.9:
            worker.tell()
        elif roll < 0.95:
            worker.directory.forget()
            worker.ask(ask.Register(UNIT))
            if rng.random() < 0.5:
                worker.tell(answer=rng.choice(list(Answer)))
            worker.publishing.forgotten()
        elif roll < 0.98:
            worker.tell(answer=rng.choice(list(Answer)))
    worker.tell_all()
    said = {(word.session, word.tier) for word in worker.inventory}
    expected: dict[PrefixHash, set[TierCode]] = {}
    for (name, place), prefix in held.items():
        if (name, place) in said:
            expected.setdefault(prefix, set()).add(TIERS[Tier(place)])
    for prefix in {worker.name(blocks, branch) for blocks in range(1, 9) for branch in range(3)}:
        assert set(worker.copies(prefix)) == expected.get(prefix, set())
    assert len(worker.publishing) == sum(map(len, expected.values()))
