"""`ownerserve transfer`: what it says of a road is so, and whatever it began ends with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import zmq
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.cli.main import cli
from ownerserve.cli.transfer.pool import BenchPool
from ownerserve.cli.transfer.shapes import TICKET, ReadShape, parse_shape, shape_of
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import KIB, MIB
from ownerserve.kv.wire.curve import read_fleet_key, write_fleet_key
from ownerserve.transfer.movers.digests import Xxh3, digest_of
from ownerserve.transfer.movers.tcp.handshake import TransferKey, transfer_key
from ownerserve.transfer.movers.tcp.server import TcpServer
from tests.support.cli.transfer import (
    Ended,
    begun,
    check,
    children_of,
    cpu_s,
    ended,
    impostor,
    lives,
    serving,
)
from tests.support.net import free_port
from tests.support.netns import two_hosts
from tests.support.waits import until

POOL_BYTES = MIB


class Keys(NamedTuple):
    """Two fleets' key files."""

    ours: Path
    others: Path


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "ours.key", tmp_path / "others.key")
    for file in made:
        write_fleet_key(file, field="file")
    return made


@contextmanager
def lending(key: Path | None) -> Iterator[str]:
    """A lender of this process, as a worker has one."""
    shown: TransferKey | None = None if key is None else transfer_key(read_fleet_key(key))
    server = TcpServer(BenchPool(POOL_BYTES), key=shown)
    yield f"127.0.0.1:{server.port}"
    server.close()


# -- shapes ------------------------------------------------------------------------------------

SHAPES = st.builds(ReadShape, st.integers(1, 300), st.integers(512, 4096))


@given(SHAPES)
def test_a_shape_lies_in_its_span_without_overlap_and_is_read_back_from_its_piece(
    shape: ReadShape,
) -> None:
    runs = shape.at(1 << 20)
    order = np.argsort(runs.addresses)
    begins, ends = runs.addresses[order], (runs.addresses + runs.lengths)[order]
    assert begins[0] >= 1 << 20 and ends[-1] <= (1 << 20) + shape.span_bytes
    assert np.all(begins[1:] > ends[:-1])
    assert runs.bytes == shape.bytes
    assert shape_of(shape.piece(), shape.span_bytes) == shape
    assert shape_of(shape.piece(), shape.span_bytes - 1) is None


@given(SHAPES)
def test_a_shape_is_written_as_it_is_read(shape: ReadShape) -> None:
    assert parse_shape(shape.option, field="--size") == shape


@pytest.mark.parametrize(
    "text",
    ["", "x", "1x", "x1MiB", "0x1MiB", "-1x1MiB", "٣x1MiB", "9999999x1KiB", "1", "2x1", "1y"],
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--size"):
        parse_shape(text, field="--size")


def test_a_pool_lends_its_shapes_and_nothing_else() -> None:
    pool = BenchPool(POOL_BYTES)
    shape = ReadShape(8, 16 * KIB)
    runs = pool.runs(TICKET, shape.piece())
    assert runs is not None and digest_of(runs, Xxh3()) == pool.digest(shape)
    assert pool.runs(TICKET + 1, shape.piece()) is None
    replace = msgspec.structs.replace
    for forged in (
        replace(shape.piece(), end_unit=1 << 31),
        replace(shape.piece(), first_unit=1),
        replace(shape.piece(), end_layer=2),
        replace(shape.piece(), artifact=bytes(32)),
        ReadShape(1, POOL_BYTES + 1).piece(),
        ReadShape(0, KIB).piece(),
    ):
        assert pool.runs(TICKET, forged) is None, forged


# -- check -------------------------------------------------------------------------------------


def test_each_road_of_this_host_is_tried() -> None:
    code, roads = check()
    assert code == 0 and list(roads) == ["shm", "readv", "tcp", "mooncake", "nixl"]
    for name in ("shm", "readv", "tcp"):
        assert roads[name]["state"] == "open" and roads[name]["mend"] == "", roads[name]
    assert roads["tcp"]["round_trip_ms"] > 0
    for name in ("mooncake", "nixl"):
        assert roads[name]["state"] != "absent" or roads[name]["mend"], roads[name]


def test_a_lender_is_asked_with_the_key(keys: Keys) -> None:
    with lending(keys.ours) as address:
        code, roads = check(address, "--curve-key-file", str(keys.ours))
    assert (code, roads["tcp"]["state"]) == (0, "open")
    assert "the key fits" in roads["tcp"]["found"] and address in roads["tcp"]["found"]
    assert roads["tcp"]["round_trip_ms"] > 0


@pytest.mark.parametrize(
    ("theirs", "given_", "found"),
    [
        ("ours", "others", "it has another key"),
        ("ours", None, "it asks for a key, and none is given"),
        (None, "ours", "it was started without a key"),
    ],
)
def test_a_key_that_does_not_fit_is_told_apart(
    keys: Keys, theirs: str | None, given_: str | None, found: str
) -> None:
    option = [] if given_ is None else ["--curve-key-file", str(getattr(keys, given_))]
    with lending(None if theirs is None else getattr(keys, theirs)) as address:
        code, roads = check(address, *option)
    assert (code, roads["tcp"]["state"]) == (1, "closed")
    assert roads["tcp"]["found"] == f"{address}: {found}"
    assert "--curve-key-file" in roads["tcp"]["mend"]


def test_nobody_there() -> None:
    address = f"127.0.0.1:{free_port()}"
    code, roads = check(address)
    assert (code, roads["tcp"]["state"]) == (1, "closed")
    assert roads["tcp"]["found"] == f"{address}: nobody is there"
    assert "transfer serve" in roads["tcp"]["mend"]


@pytest.mark.parametrize(
    ("said", "then", "found"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "closes", "another protocol: HTTP"),
        (b"\xff\0\0\0\0\0\0\0\1\x7f", "closes", "another protocol: ZeroMQ"),
        (b"220 mail.example.org", "closes", "another protocol: b'220 mail.example"),
        (b"", "closes", "it closes at once"),
        pytest.param(b"", "waits", "says nothing", marks=pytest.mark.slow),  # it is waited for
    ],
)
def test_another_protocol_is_told(said: bytes, then: str, found: str) -> None:
    with impostor(said, then=then) as address:
        code, roads = check(address)
    assert (code, roads["tcp"]["state"]) == (1, "closed")
    assert found in roads["tcp"]["found"]


def test_a_rpc_port_is_told() -> None:
    """ZeroMQ hangs up at our first words; who says nothing hears its own."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        code, roads = check(f"127.0.0.1:{port}")
    assert code == 1 and "another protocol: ZeroMQ" in roads["tcp"]["found"]


def test_another_host_is_not_asked_without_a_key() -> None:
    code, roads = check("192.0.2.1:7800")
    assert code == 1 and "another host, and no key is given" in roads["tcp"]["found"]
    assert "--curve-key-file" in roads["tcp"]["mend"]


def test_a_process_is_asked_about() -> None:
    code, roads = check("--pid", str(os.getpid()))
    assert code == 0 and str(os.getpid()) in roads["readv"]["found"]


def test_a_process_that_is_none() -> None:
    code, roads = check("--pid", str(1 << 22))  # one more than any
    assert code == 1 and "there is no process" in roads["readv"]["found"]


def test_people_are_shown_a_table_with_the_mend() -> None:
    shown = CliRunner().invoke(cli, ["transfer", "check", f"127.0.0.1:{free_port()}"])
    assert shown.exit_code == 1
    assert "nobody is there" in shown.stdout and "mend:" in shown.stdout


@pytest.mark.slow
def test_a_host_without_sealed_memory_is_told_so() -> None:
    found = ended("check", "--json", "-", before=["bash", "-c", 'ulimit -f 0; exec "$@"', "--"])
    shm, readv, *_ = found.json["roads"]
    assert (found.code, shm["state"], readv["state"]) == (0, "closed", "open")
    assert "File too large" in shm["found"] and "memfd_create" in shm["mend"]


# -- serve and bench ---------------------------------------------------------------------------

SMALL = ("--size", "1MiB", "--size", "64x4KiB", "--rounds", "1")


@pytest.mark.slow
def test_a_bench_measures_each_open_road_beside_memcpy(keys: Keys) -> None:
    found = ended("bench", *SMALL, "--curve-key-file", str(keys.ours), "--json", "-")
    assert (found.code, found.err) == (0, "")
    assert found.json["schema"] == "ownerserve.transfer.bench/1" and found.json["closed"] == []
    named = [(one["shape"], one["road"]) for one in found.json["speeds"]]
    roads = ("memcpy", "memcpy, xxh3", "shm", "readv", "tcp")
    assert named == [(shape, road) for shape in ("1 MiB", "64 x 4 KiB") for road in roads]
    for one in found.json["speeds"]:
        assert one["slowest_gb_s"] <= one["gb_s"] <= one["fastest_gb_s"] and one["gb_s"] > 0
        assert one["cpu_s_per_gb"] > 0


@pytest.mark.slow
def test_people_are_shown_a_table() -> None:
    found = ended("bench", *SMALL)
    assert found.code == 0 and "of memcpy" in found.out and "64 x 4 KiB" in found.out


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_pool_is_measured_by_who_has_the_key_and_ends_clean(
    keys: Keys, tmp_path: Path, by: signal.Signals
) -> None:
    with serving(tmp_path, "--size", "4MiB", "--curve-key-file", str(keys.ours)) as (pool, address):
        found = ended("bench", address, *SMALL, "--curve-key-file", str(keys.ours), "--json", "-")
        assert (found.code, found.json["lender"]) == (0, address), found.err
        assert found.json["round_trip_ms"] > 0
        assert {one["road"] for one in found.json["speeds"]} == {"memcpy", "memcpy, xxh3", "tcp"}
        refused = ended("bench", address, *SMALL, "--curve-key-file", str(keys.others))
        assert (refused.code, refused.out) == (2, "")
        assert refused.line.startswith(f"error: HOST:PORT: {address}: it has another key; give")
        pool.send_signal(by)
        assert Ended(pool).code == 0


@pytest.mark.slow
def test_two_hosts(keys: Keys, tmp_path: Path) -> None:
    key = ("--curve-key-file", str(keys.ours))
    with two_hosts() as (one, other):
        there = ("--host", other.address, "--size", "4MiB", *key)
        with serving(tmp_path, *there, before=other.words()) as (_, address):
            assert address.startswith(f"{other.address}:")
            found = ended("check", address, *key, "--json", "-", before=one.words())
            assert found.code == 0, found.out
            found = ended("bench", address, *SMALL, *key, "--json", "-", before=one.words())
            assert found.code == 0, found.err
        nobody = ended("check", address, *key, before=one.words())
        assert nobody.code == 1 and "nobody is there" in nobody.out


@pytest.mark.slow
def test_a_pool_that_is_too_small_says_which_size_is_needed(tmp_path: Path) -> None:
    with serving(tmp_path, "--size", "64KiB") as (_, address):
        found = ended("bench", address, *SMALL)
    assert found.code == 2 and "transfer serve --size 1MiB" in found.line


@pytest.mark.slow
def test_a_pool_is_not_lent_to_everybody(tmp_path: Path) -> None:
    found = ended("serve", "--host", "0.0.0.0")
    assert found.code == 2 and found.line.startswith("error: --host: 0.0.0.0 is reachable")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = ended("serve", "--port", str(taken.getsockname()[1]))
    assert found.code == 2 and found.line.startswith("error: --host/--port: ")


LONG = ("--size", "16MiB", "--rounds", "1000")


@pytest.mark.slow
def test_a_lender_that_is_killed_amid_a_bench_is_told_in_one_line(tmp_path: Path) -> None:
    with serving(tmp_path, "--size", "16MiB") as (pool, address):
        before_s = cpu_s(pool.pid)
        bench = begun("bench", address, *LONG)
        until(lambda: cpu_s(pool.pid) > before_s + 0.05 or bench.poll() is not None)
        pool.kill()
        found = Ended(bench)
    assert (found.code, found.out) == (2, "")
    assert found.line.startswith(f"error: tcp: {address} stopped lending")


def working_child(bench: subprocess.Popen[str]) -> int:
    """The pid of the bench's lending child, once it has been read from for a while."""
    until(lambda: children_of(bench.pid) or bench.poll() is not None, what="a child")
    [child] = children_of(bench.pid)
    until(lambda: cpu_s(bench.pid) > 2.0 or bench.poll() is not None, what="a bench at work")
    assert bench.poll() is None, bench.communicate()
    return child


@pytest.mark.slow
def test_a_child_that_is_killed_amid_a_bench_is_told_in_one_line() -> None:
    bench = begun("bench", *LONG)
    os.kill(working_child(bench), signal.SIGKILL)
    found = Ended(bench)
    assert (found.code, found.out) == (2, "")
    assert "a child of this process stopped lending" in found.line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_nothing_is_left_of_a_bench_that_is_ended(by: signal.Signals, code: int) -> None:
    bench = begun("bench", *LONG)
    child = working_child(bench)
    for pid in (bench.pid, child):
        assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text()
    if by is signal.SIGINT:
        os.killpg(bench.pid, by)  # as a terminal sends it
    else:
        bench.send_signal(by)
    found = Ended(bench)
    assert (found.code, found.out) == (code, "")
    assert by is not signal.SIGINT or found.line == "interrupted"
    until(lambda: not lives(child), what="the child's end")
