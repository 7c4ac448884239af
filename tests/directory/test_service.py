"""The directory as a service: over a socket, from the command line, with bad and late frames."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from click.testing import CliRunner

from ownerserve.cli.main import cli
from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.messages import DirectoryRefusal
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.frames import (
    MAX_FRAME_BYTES,
    FrameFailed,
    Outcomes,
    RequestBatch,
    decode_answer,
    encode,
)
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.rules import StateKind, TierCode
from ownerserve.directory.terms import FILE_NAME, TermFile
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import InvalidInput, PeerLost
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import ORDINAL_LIMIT, Epoch, RoutingUnit, Term
from tests.support.waits import WAIT_S, until

A = RoutingUnit(WorkerId("a"), 0, Incarnation(1))
B = RoutingUnit(WorkerId("b"), 0, Incarnation(1))
S1 = SessionId("s1")


@pytest.fixture
def served() -> Iterator[DirectoryServer]:
    directory = EmbeddedDirectory(ManualClock(), TermFile(), opens_in_s=0.0)
    server = DirectoryServer(directory)
    server.start()
    yield server
    server.stop()


def test_a_client_is_a_directory(served: DirectoryServer) -> None:
    client = DirectoryClient(served.address)
    leased, bound = client.execute([ask.Register(A), ask.Bind(S1, A)])
    assert isinstance(leased, ask.Leased) and isinstance(bound, ask.Bound)
    records = client.status().records
    assert records is not None and (records.holders, records.sessions) == (1, 1)
    client.close()


def extents(count: int) -> list[ask.HeldExtent]:
    kinds = int(StateKind.DENSE | StateKind.COMPRESSED | StateKind.CHECKPOINT)
    return [
        ask.HeldExtent(PrefixHash(n.to_bytes(32, "big")), 100_000 + n, TierCode.DISK, kinds)
        for n in range(count)
    ]


def test_a_page_of_an_inventory_and_many_lookups_fit_a_frame(served: DirectoryServer) -> None:
    """What the biggest askers send at once, measured."""
    unit = RoutingUnit(WorkerId("a-worker.with.a-long.name:8100"), 7, Incarnation(time.time_ns()))
    page = ask.Publish(unit, extents=tuple(extents(1000)))
    names = [SessionId(f"{n:032x}") for n in range(10_000)]
    asked = [ask.FindSession(name) for name in names]
    sizes = {
        "page": len(encode(RequestBatch((page,)))),
        "lookups": len(encode(RequestBatch(tuple(asked)))),
    }
    client = DirectoryClient(served.address)
    leased, published = client.execute([ask.Register(unit), page])
    assert isinstance(leased, ask.Leased) and isinstance(published, ask.Published)
    client.execute([ask.Bind(name, unit) for name in names])
    found = client.execute(asked)
    assert {type(one) for one in found} == {ask.SessionIs}
    sizes["answers"] = len(encode(Outcomes(tuple(found))))
    assert max(sizes.values()) < MAX_FRAME_BYTES / 10, sizes
    client.close()


@pytest.mark.parametrize("limit", ["MAX_FRAME_BYTES", "REQUESTS_MAX"])
def test_what_is_too_much_for_a_frame_goes_in_several(
    served: DirectoryServer, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    client = DirectoryClient(served.address)
    monkeypatch.setattr(f"ownerserve.directory.rpc.client.{limit}", 1000)
    names = [SessionId(f"s{n}") for n in range(2500)]
    client.execute([ask.Register(A)])
    bound = client.execute([ask.Bind(name, A) for name in names])
    epochs = [one.epoch for one in bound if isinstance(one, ask.Bound)]
    assert len(epochs) == len(names) and epochs == sorted(epochs), "in order"
    if limit == "MAX_FRAME_BYTES":
        (never,) = client.execute([ask.Bind(SessionId("s" * 2000), A)])
        assert never == ask.Refused(DirectoryRefusal.MALFORMED)
    client.close()


def test_nobody_there_is_an_outcome() -> None:
    client = DirectoryClient("tcp://127.0.0.1:9", timeout_s=0.1)
    (outcome,) = client.execute([ask.FindSession(S1)])
    assert outcome == ask.Refused(DirectoryRefusal.UNREACHABLE)
    with pytest.raises(PeerLost):
        client.status()
    client.close()


@pytest.mark.parametrize("answer", [[b"\xc1"], [b""], [b"\x92\x09\xc0"], [], [b"a", b"b"]])
def test_an_answer_that_cannot_be_read_is_none(answer: list[bytes]) -> None:
    """The client does not raise, and goes on asking."""
    port = zmq.Context.instance().socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{port.bind_to_random_port('tcp://127.0.0.1')}"
    lost = ask.Refused(DirectoryRefusal.UNREACHABLE)

    def babble() -> None:
        for _ in range(2):
            peer, number, _ = port.recv_multipart()
            port.send_multipart([peer, number, *answer])

    thread = threading.Thread(target=babble)
    thread.start()
    client = DirectoryClient(address)
    assert client.execute([ask.FindSession(S1)]) == [lost]
    with pytest.raises(PeerLost):
        client.status()
    client.close()
    thread.join()
    port.close(linger=0)


@pytest.mark.parametrize(
    "frame", [b"", b"\xff" * 20, msgspec.msgpack.encode([9, {"type": "status"}]), b"\x92\x01\xc0"]
)
def test_a_bad_frame_gets_a_typed_answer(served: DirectoryServer, frame: bytes) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(served.address)
    socket.send_multipart([b"number 1", frame])
    assert socket.poll(1000 * WAIT_S)
    number, data = socket.recv_multipart()
    socket.close()
    assert number == b"number 1" and isinstance(decode_answer(data), FrameFailed)


def test_it_is_not_offered_to_the_world() -> None:
    directory = EmbeddedDirectory(ManualClock(), TermFile())
    with pytest.raises(InvalidInput, match="reachable from outside"):
        DirectoryServer(directory, host="0.0.0.0")


def test_terms_grow_over_restarts(tmp_path: Path) -> None:
    first = TermFile(tmp_path)
    assert first.is_new
    one = first.start()
    again = TermFile(tmp_path)
    assert not again.is_new
    two = again.start()
    three = again.start(above=Term(40, 7))
    assert one < two < three and three.ordinal == 41
    (tmp_path / FILE_NAME).write_text("[1,")
    with pytest.raises(InvalidInput, match="is no term"):
        TermFile(tmp_path)


def test_serve_status_rebuild(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [
        sys.executable, "-m", "ownerserve.cli.main", "directory", "serve", "--port", "0", "--home",
        str(tmp_path / "home"), "--new-fleet", "--lease", "0.3", "--ready-file", str(ready),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        address = ready.read_text().strip()
        before = _json("directory", "status", address)
        assert before["schema"] == "ownerserve.directory.status/1"
        assert before["opens_in_s"] == 0 and before["records"]["sessions"] == 0
        client = DirectoryClient(address)
        client.execute([ask.Register(A), ask.Bind(S1, A)])
        after = _json("directory", "rebuild", address)
        assert after["term"]["ordinal"] == before["term"]["ordinal"] + 1
        assert after["opens_in_s"] == 0 and after["records"]["sessions"] == 0
        (outcome,) = client.execute([ask.RenewLease(A)])
        assert outcome == ask.Refused(DirectoryRefusal.UNKNOWN_HOLDER)
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


def _json(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(cli, [*words, "--json", "-"], catch_exceptions=False)
    assert result.exit_code == 0
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_status_shows_a_session_a_prefix_and_a_group(served: DirectoryServer) -> None:
    tip, other = PrefixHash(bytes([1]) * 32), PrefixHash(bytes([2]) * 32)
    client = DirectoryClient(served.address)
    _, bound = client.execute([ask.Register(A), ask.Bind(S1, A)])
    assert isinstance(bound, ask.Bound)
    kinds = int(StateKind.DENSE | StateKind.CHECKPOINT)
    told = ask.Advance(S1, A, bound.epoch, 1, tip, 512, kinds=kinds, group="repo")
    on_disk = ask.HeldExtent(tip, 512, TierCode.DISK, int(StateKind.DENSE))
    client.execute([told, ask.Publish(A, (on_disk,))])
    status = ("directory", "status", served.address)
    found = _json(*status, "--session", "s1", "--prefix", other.hex(), "--group", "repo")
    session: Any = found["session"]
    assert (session["owner"], session["version"], session["owner_live"]) == (
        "a rank 0 life 1", 1, True,
    )  # fmt: skip
    assert [(copy["tier"], copy["kinds"]) for copy in session["tip"]["copies"]] == [
        ("device", ["dense", "checkpoint"]), ("disk", ["dense"]),
    ]  # fmt: skip
    assert found["prefix"] == {"prefix_hash": other.hex(), "copies": []}
    group: Any = found["group"]
    assert [(one["prefix_hash"], one["uses"]) for one in group["members"]] == [(tip.hex(), 1)]
    assert _json(*status, "--session", "none")["session"] is None
    lost = ask.Publish(A, gone=((tip, TierCode.DISK), (tip, TierCode.DEVICE)))
    client.execute([lost])
    counted = _json(*status)
    assert counted["lost_copies"] == 1
    asked: Any = counted["asked"]
    assert (asked["advance"], asked["publish"], asked["find_group"]) == (1, 2, 1)
    shown = CliRunner().invoke(cli, [*status, "--session", "s1", "--group", "repo"])
    assert shown.exit_code == 0 and "last copies lost" in shown.stdout
    bad = CliRunner().invoke(cli, [*status, "--prefix", "xy"])
    assert isinstance(bad.exception, InvalidInput) and "--prefix" in str(bad.exception)
    client.close()


@pytest.mark.parametrize("failing", ["sweep", "status", "execute"])
def test_a_backend_that_raises_ends_no_service(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Of `execute`, one answer too few is a fault as well."""
    directory = EmbeddedDirectory(ManualClock(), TermFile(), opens_in_s=0.0)
    failed = threading.Event()

    def fails(*_: object) -> list[ask.Outcome]:
        failed.set()
        if failing == "execute":
            return []
        raise RuntimeError("a fault of the backend")

    monkeypatch.setattr("ownerserve.directory.rpc.server.SWEEP_EVERY_S", 0.01)
    server = DirectoryServer(directory)
    client = DirectoryClient(server.address, timeout_s=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(directory, failing, fails)
        server.start()
        if failing == "status":
            with pytest.raises(PeerLost):
                client.status()
        elif failing == "execute":
            client.execute([ask.Register(A)])
        assert failed.wait(WAIT_S)
        time.sleep(0.1)
    (leased,) = client.execute([ask.Register(A)])
    client.close()
    server.stop()
    assert isinstance(leased, ask.Leased)


def test_a_request_that_makes_a_backend_raise_costs_its_own_frame_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frames that come together are decided together, whosever they are."""
    directory = EmbeddedDirectory(ManualClock(), TermFile(), opens_in_s=0.0)
    execute, begun, go_on = directory.execute, threading.Event(), threading.Event()

    def slowly(requests: Sequence[ask.Request]) -> list[ask.Outcome]:
        begun.set()
        go_on.wait(WAIT_S)
        return execute(requests)

    monkeypatch.setattr(directory, "execute", slowly)
    server = DirectoryServer(directory)
    server.start()
    last = Epoch(Term(ORDINAL_LIMIT - 1, 0), 0)  # no term can be above this one
    frames = [ask.FindSession(S1), ask.Register(A), ask.Register(B, seen=last), ask.Bind(S1, A)]
    with zmq.Context.instance().socket(zmq.DEALER) as client:
        client.connect(server.address)
        for number, request in enumerate(frames):
            client.send_multipart([bytes([number]), encode(RequestBatch((request,)))])
            assert begun.wait(WAIT_S)
        time.sleep(0.2)  # the service is held up by the first: the others lie there together
        go_on.set()
        outcomes: dict[int, ask.Outcome] = {}
        while len(outcomes) < len(frames) and client.poll(1000 * WAIT_S):
            number, data = client.recv_multipart()
            answer = decode_answer(data)
            assert isinstance(answer, Outcomes)
            (outcomes[number[0]],) = answer.outcomes
    server.stop()
    assert outcomes[2] == ask.Refused(DirectoryRefusal.MALFORMED)
    assert isinstance(outcomes[1], ask.Leased) and isinstance(outcomes[3], ask.Bound)


def test_a_wish_for_a_copy_is_shown_until_there_is_one(served: DirectoryServer) -> None:
    tip = PrefixHash(bytes([1]) * 32)
    client = DirectoryClient(served.address)
    client.execute([ask.Register(A), ask.Register(B)])
    client.execute(
        [ask.Publish(A, (ask.HeldExtent(tip, 512, TierCode.DISK, int(StateKind.DENSE)),))]
    )
    replicate = ("directory", "replicate", served.address)
    wished = _json(*replicate, tip.hex(), "--to", "b")
    assert wished["wanted"] == ["b rank 0 life 1"]
    status = ("directory", "status", served.address, "--prefix", tip.hex())
    shown: Any = _json(*status)["prefix"]
    assert shown["wanted"] == ["b rank 0 life 1"]
    assert "wished for at" in CliRunner().invoke(cli, status).stdout
    client.execute(
        [ask.Publish(B, (ask.HeldExtent(tip, 512, TierCode.DISK, int(StateKind.DENSE)),))]
    )
    held: Any = _json(*status)["prefix"]
    assert held["wanted"] == [] and len(held["copies"]) == 2
    client.close()
    other = "02" * 32
    for words, field in (
        ((tip.hex(), "--to", "none"), "--to"),
        ((tip.hex(), "--to", "b/x"), "--to"),
        ((other, "--to", "b"), "PREFIX"),
        (("xy", "--to", "b"), "PREFIX"),
    ):
        bad = CliRunner().invoke(cli, [*replicate, *words])
        assert isinstance(bad.exception, InvalidInput) and bad.exception.field == field
