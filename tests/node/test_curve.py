"""Keys: where others reach a port, only the fleet is heard, and only the fleet is believed."""

from __future__ import annotations

import logging
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import zmq

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.opening import opener_of
from ownerserve.directory.rpc.client import DirectoryClient, why_silent
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import InvalidInput, PeerLost
from ownerserve.kv.wire.curve import FleetKey, read_fleet_key, write_fleet_key
from ownerserve.kv.wire.framed import FramedClient
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    MAX_FRAME_BYTES,
    Reject,
    Release,
    Released,
    RpcAnswer,
    RpcRequest,
    decode_answer,
    encode,
)
from ownerserve.node.rpc.server import RpcClient, RpcServer
from tests.support.net import own_address

SHORT_S = 0.5


@pytest.fixture(scope="module")
def outside() -> str:
    return own_address()


def drawn(folder: Path, name: str) -> FleetKey:
    write_fleet_key(folder / name, field="--out")
    return read_fleet_key(folder / name)


@pytest.fixture
def key(tmp_path: Path) -> FleetKey:
    return drawn(tmp_path, "fleet.key")


def released(request: RpcRequest) -> Future[RpcAnswer]:
    future: Future[RpcAnswer] = Future()
    future.set_result(Released())
    return future


@pytest.fixture
def node(outside: str, key: FleetKey) -> Iterator[RpcServer]:
    server = RpcServer(host=outside, key=key)
    server.start(released)
    yield server
    server.stop()


@pytest.fixture
def directory(outside: str, key: FleetKey) -> Iterator[DirectoryServer]:
    embedded = EmbeddedDirectory(ManualClock(0.0), TermFile(), opens_in_s=0.0)
    server = DirectoryServer(embedded, host=outside, key=key)
    server.start()
    yield server
    server.stop()


# ---- the file


def test_a_key_file_is_its_owner_s_alone_and_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    one = drawn(tmp_path, "fleet.key")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(InvalidInput, match=r"--out: .*File exists; name another file"):
        write_fleet_key(path, field="--out")
    assert read_fleet_key(path).server_secret == one.server_secret
    other = drawn(tmp_path, "other.key")
    secrets = {one.server_secret, one.client_secret, other.server_secret, other.client_secret}
    assert len(secrets) == 4
    assert not [one for one in secrets if one.decode() in repr(other)]


def test_what_is_no_key_file_is_one_error_that_shows_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    with pytest.raises(InvalidInput, match=r"--curve-key-file: .*No such file"):
        read_fleet_key(path)
    secret = zmq.curve_keypair()[1].decode()
    bad = (
        "",
        "\x00\xff",
        f'server_secret = "{secret}"',
        f'server_secret = "{secret}"\nclient_secret = 5',
        f'server_secret = "{secret}"\nclient_secret = "{secret[:-1]}"',
        f'server_secret = "{secret}"\nclient_secret = "{secret}"\nother = 1',
        f'server_secret = "{secret}',
        "x" * 10_000,
    )
    for text in bad:
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(InvalidInput, match="holds no keys of a fleet") as told:
            read_fleet_key(path)
        assert secret[:8] not in str(told.value)
    path.unlink()
    drawn(tmp_path, "fleet.key")
    path.chmod(0o604)
    with pytest.raises(InvalidInput, match=r"by everybody \(mode 0604\); chmod 600"):
        read_fleet_key(path)


# ---- listening


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "outside"])
def test_without_keys_nothing_listens_where_others_reach(host: str, outside: str) -> None:
    host = outside if host == "outside" else host
    embedded = EmbeddedDirectory(ManualClock(0.0), TermFile(), opens_in_s=0.0)
    makers: tuple[Callable[[], object], ...] = (
        lambda: RpcServer(host=host),
        lambda: DirectoryServer(embedded, host=host),
    )
    for make in makers:
        with pytest.raises(InvalidInput, match=r"reachable from outside.*--curve-key-file"):
            make()


def test_an_address_of_another_machine_is_one_error(key: FleetKey) -> None:
    with pytest.raises(InvalidInput, match=r"rpc host: 192.0.2.77.*use an address of this machine"):
        RpcServer(host="192.0.2.77", key=key)


# ---- speaking


def test_the_fleet_is_answered(node: RpcServer, directory: DirectoryServer, key: FleetKey) -> None:
    assert node.address.startswith("curve://")
    client = RpcClient(node.address, key=key)
    assert client.ask(Release(1)) == Released()
    framed = FramedClient(node.address, timeout_s=4.0, key=key, read_bytes_max=MAX_FRAME_BYTES)
    told = decode_answer(framed.ask(b"x" * (2 * MAX_FRAME_BYTES)))
    assert told == Reject(WorkerRefusal.MALFORMED)
    assert client.ask(Release(1)) == Released(), "a long frame is refused here too"
    framed.close()
    client.close()
    asked = opener_of(directory.address, key)()
    assert asked.status().opens_in_s == 0.0
    asked.close()


def test_who_has_no_key_or_another_is_not_answered(
    node: RpcServer,
    directory: DirectoryServer,
    key: FleetKey,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    strange = drawn(tmp_path, "strange.key")
    spy = FleetKey(key.server_secret, strange.client_secret)  # knows whom it speaks to
    plain = "tcp://" + node.address.removeprefix("curve://")
    with caplog.at_level(logging.WARNING):
        for address, used in ((node.address, strange), (node.address, spy), (plain, None)):
            client = RpcClient(address, timeout_s=SHORT_S, key=used)
            with pytest.raises(TimeoutError):
                client.ask(Release(1))
            client.close()
    assert spy.client_public.decode() in caplog.text
    plain = "tcp://" + directory.address.removeprefix("curve://")
    for address, used in ((directory.address, strange), (directory.address, spy), (plain, None)):
        asked = DirectoryClient(address, timeout_s=SHORT_S, key=used)
        with pytest.raises(PeerLost):
            asked.status()
        asked.close()
    assert why_silent(directory.address, strange) == "it has other keys, or none (tcp://...)"
    assert why_silent(plain, None) == "it wants keys (curve://...), or is no directory"
    assert why_silent(directory.address, key) == "somebody is there, and silent"
    client = RpcClient(node.address, key=key)
    assert client.ask(Release(1)) == Released(), "and the fleet is, all the while"
    client.close()


def test_a_server_without_the_keys_is_not_believed(outside: str, key: FleetKey) -> None:
    """Somebody else listens at the address: nothing is said to it."""
    with socket.create_server((outside, 0)) as liar:
        address = f"curve://{outside}:{liar.getsockname()[1]}"
        client = RpcClient(address, timeout_s=SHORT_S, key=key)
        with pytest.raises(TimeoutError):
            client.ask(Release(77))
        heard, _ = liar.accept()
        heard.settimeout(1.0)
        assert encode(Release(77)) not in heard.recv(65536)
        heard.close()
        client.close()
    assert why_silent(address, key) == "nobody is there"


def test_an_address_that_wants_keys_is_refused_without(key: FleetKey) -> None:
    with pytest.raises(InvalidInput, match=r"--directory: .* wants the fleet's keys; give --curve"):
        opener_of("curve://127.0.0.1:7700")
    with pytest.raises(InvalidInput, match="wants the fleet's keys"):
        RpcClient("curve://127.0.0.1:7700")


# ---- the commands


def ownerserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ownerserve.cli.main", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_a_directory_with_keys_is_run_and_asked(outside: str, tmp_path: Path) -> None:
    fleet, other, ready = tmp_path / "fleet.key", tmp_path / "other.key", tmp_path / "ready"
    for path in (fleet, other):
        assert ownerserve("directory", "keys", "--out", str(path)).returncode == 0
    again = ownerserve("directory", "keys", "--out", str(fleet))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    serve = ["directory", "serve", "--port", "0", "--new-fleet", "--host", outside]
    told = ownerserve(*serve)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert "error: --host: " in told.stderr
    line = [sys.executable, "-m", "ownerserve.cli.main", *serve]
    line += ["--curve-key-file", str(fleet), "--ready-file", str(ready)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
            address = ready.read_text().strip()
            assert address.startswith(f"curve://{outside}:")
            status = ["directory", "status", address]
            good = ownerserve(*status, "--curve-key-file", str(fleet), "--json", "-")
            assert good.returncode == 0, good.stderr
            rebuild = ["directory", "rebuild", "--wait", "0", address]
            assert ownerserve(*rebuild, "--curve-key-file", str(fleet)).returncode == 0
            wrong = ownerserve(*status, "--curve-key-file", str(other))
            assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
            assert "it has other keys" in wrong.stderr
            without = ownerserve(*status)
            assert (without.returncode, without.stderr.count("\n")) == (2, 1)
            assert "wants the fleet's keys; give --curve-key-file" in without.stderr
        finally:
            process.terminate()
