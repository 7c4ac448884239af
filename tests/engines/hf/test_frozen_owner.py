"""An owner that is frozen beyond its lease: another serves and owns, its own word is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject, Released, ReleaseSession
from ownerserve.node.ownership.ownership import boot_time_s
from tests.support.hf.fleet_rig import WAIT_S, ServedGateway
from tests.support.hf.worker_process import Wire, WorkerProcess
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash]

PROMPT = [7 + n % 200 for n in range(1_500)]
"""So long that computing it costs far more than loading it: what costs little is not kept."""
LEASE_S = 8.0
ADVANCES, MOVES, ENDS = (SessionId(digit * 32) for digit in "abc")
NAMES = (ADVANCES, MOVES, ENDS)


class BootClock:
    def now(self) -> float:
        return boot_time_s()


class Counted(EmbeddedDirectory):
    """A directory that counts what it answers, by request and outcome."""

    def __init__(self) -> None:
        super().__init__(BootClock(), TermFile(), lease_s=LEASE_S, opens_in_s=0.0)
        self.answered: Counter[tuple[type, type]] = Counter()

    def execute(self, requests: Sequence[ask.Request]) -> list[ask.Outcome]:
        outcomes = super().execute(requests)
        pairs = zip(requests, outcomes, strict=True)
        self.answered.update((type(one), type(outcome)) for one, outcome in pairs)
        return outcomes


class Rig:
    """A directory, an owner that can be frozen with its word on the way, and another worker."""

    def __init__(self, folder: Path) -> None:
        self.directory = Counted()
        self.server = DirectoryServer(self.directory)
        self.server.start()
        self.wire = Wire(self.server.address)
        self._stack = ExitStack()
        self._stack.callback(self.server.stop)
        kept = ("--remote", str(folder / "shared"), "--spill-after", "5")
        self.frozen = self._started(WorkerProcess(folder, "w0", self.wire.address, *kept))
        self.other = self._started(WorkerProcess(folder, "w1", self.server.address, *kept))
        self.alone = self._started(WorkerProcess(folder, "w2", None))
        """Nobody disturbs it, and it keeps nothing of one session for another."""

    def _started(self, worker: WorkerProcess) -> WorkerProcess:
        self._stack.callback(worker.stop)
        return worker

    def close(self) -> None:
        self.wire.let_go()
        self._stack.close()
        self.wire.close()

    def find(self, session: str) -> ask.SessionIs | ask.Miss:
        client = DirectoryClient(self.server.address)
        try:
            (found,) = client.execute([ask.FindSession(SessionId(session))])
        finally:
            client.close()
        assert isinstance(found, ask.SessionIs | ask.Miss)
        return found

    def record(self, session: str) -> ask.SessionIs:
        found = self.find(session)
        assert isinstance(found, ask.SessionIs)
        return found

    def stands(self, owner: WorkerProcess, version: int) -> bool:
        """All sessions are its, at this version."""
        records = [self.find(name) for name in NAMES]
        return all(
            isinstance(one, ask.SessionIs) and (one.owner, one.version) == (owner.unit, version)
            for one in records
        )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    one = Rig(tmp_path)
    yield one
    one.close()


def prompt_of(name: SessionId, turn: int) -> list[int]:
    """Turn `turn` of a session: all that was said before, and more."""
    first = 1 + NAMES.index(name)
    return [first, *PROMPT, *(200 + n % 50 for n in range(40 * turn))]


def check_answer(rig: Rig, answer: dict[str, list[float]], prompt: list[int]) -> None:
    undisturbed = rig.alone.serve(prompt, None)
    assert answer["tokens"] == undisturbed["tokens"]
    assert answer["logprobs"] == pytest.approx(undisturbed["logprobs"], abs=1e-4)


def test_the_word_of_who_slept_beyond_its_lease_is_refused_and_no_answer_is_wrong(rig: Rig) -> None:
    frozen, other = rig.frozen, rig.other
    for name in NAMES:
        frozen.serve(prompt_of(name, 1), name)
    until(lambda: rig.stands(frozen, 1))
    former = {name: rig.record(name).epoch for name in NAMES}

    rig.wire.hold()  # and now it says all that an owner may say
    frozen.serve(prompt_of(ADVANCES, 2), ADVANCES)
    release = ReleaseSession(MOVES, former[MOVES], other.unit)
    until(lambda: frozen.asked(release) == Released())
    frozen.serve(prompt_of(ENDS, 2), ENDS, final=True)
    words = (b"advance", b"transfer", b"end_session")
    until(lambda: all(word in rig.wire.held for word in words))  # asked again until it is answered
    frozen.freeze()
    kept = 'ownerserve_spill_records_total{outcome="kept"}'

    until(lambda: not any(rig.record(name).owner_live for name in NAMES))
    for name in NAMES:
        check_answer(rig, other.serve(prompt_of(name, 2), name), prompt_of(name, 2))
    until(lambda: rig.stands(other, 2))
    later = {name: rig.record(name).epoch for name in NAMES}
    assert all(later[name] > former[name] for name in NAMES)

    answered = rig.directory.answered
    rig.wire.let_go()  # what it said arrives
    until(lambda: answered[ask.Advance, ask.Conflict])
    until(lambda: answered[ask.Transfer, ask.Conflict])
    until(lambda: answered[ask.EndSession, ask.Refused])
    frozen.thaw()
    for verb in ("advance", "hand_over", "end"):
        counted = f'ownerserve_owner_refusals_total{{reason="lease_over",verb="{verb}"}}'
        until(lambda counted=counted: frozen.metric(counted))
    assert frozen.metric("ownerserve_sessions_owned") == 0
    until(lambda: frozen.metric("ownerserve_directory_leased") == 1)  # registered anew
    assert rig.stands(other, 2)
    assert {name: rig.record(name).epoch for name in NAMES} == later

    before = frozen.metric(kept)
    for name in NAMES:  # it serves as a guest, hears of the later owner, and keeps what it seals
        prompt = prompt_of(name, 3)
        check_answer(rig, frozen.serve(prompt, name, epoch=later[name]), prompt)
        release = ReleaseSession(name, former[name], other.unit)
        assert frozen.asked(release) == Reject(WorkerRefusal.STALE_EPOCH)
    counted = 'ownerserve_owner_refusals_total{reason="stale_epoch",verb="release"}'
    assert frozen.metric(counted) == 3
    until(lambda: frozen.metric(kept) > before)
    assert not frozen.metric('ownerserve_spill_records_total{outcome="low_utility"}')
    assert not frozen.metric('ownerserve_spill_records_total{outcome="not_kept"}')
    for name in NAMES:
        prompt = prompt_of(name, 4)
        check_answer(rig, other.serve(prompt, name), prompt)
    until(lambda: rig.stands(other, 3))  # one more turn of its owner; a guest's counts nowhere


def test_who_slept_beyond_its_lease_owns_nothing_and_breaks_nothing(rig: Rig) -> None:
    """The same with a gateway in front, which finds out by itself."""
    workers = [rig.frozen, rig.other]
    gateway = ServedGateway(*workers, directory=rig.server.address)  # type: ignore[arg-type]
    try:
        first = gateway.complete(PROMPT, "s")
        name = gateway.read(lambda: str(next(iter(gateway.gateway.state.sessions.items()))[0]))

        def owner_at(version: int) -> str | None:
            found = rig.find(name)
            is_there = isinstance(found, ask.SessionIs) and found.version == version
            return found.owner.worker if is_there and isinstance(found, ask.SessionIs) else None

        until(lambda: owner_at(1))
        frozen = next(w for w in workers if w.name == first.headers["x-ownerserve-worker"])
        other = next(w for w in workers if w is not frozen)
        before = rig.find(name)
        frozen.freeze()
        until(lambda: not gateway.read(lambda: gateway.gateway.state.fleet[frozen.name].up))
        again = gateway.complete(
            [*PROMPT, 9], "s"
        )  # served at once, by a guest until the lease ends
        assert again.status_code == 200 and again.headers["x-ownerserve-worker"] == other.name

        def moves_on() -> bool:
            """A guest's turns are no record; the next one after the lease has ended binds."""
            assert gateway.complete([*PROMPT, 9], "s").status_code == 200
            found = rig.find(name)
            return isinstance(found, ask.SessionIs) and found.owner != before.owner

        until(moves_on)
        after = rig.find(name)
        assert isinstance(before, ask.SessionIs) and isinstance(after, ask.SessionIs)
        assert after.epoch > before.epoch
        frozen.thaw()
        until(lambda: frozen.metric("ownerserve_sessions_owned") == 0)  # by its own clock
        until(lambda: frozen.metric("ownerserve_directory_leased") == 1)  # registered anew
        assert other.metric("ownerserve_sessions_owned") == 1
        body = {"prompt": [*PROMPT, 9], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        cold = httpx.post(f"{frozen.url}/v1/completions", json=body, timeout=WAIT_S).json()
        warm = gateway.complete([*PROMPT, 9], "s").json()
        assert cold["choices"][0]["token_ids"] == warm["choices"][0]["token_ids"]
        still = rig.find(name)
        assert isinstance(still, ask.SessionIs) and still.owner == after.owner
    finally:
        gateway.close()
