"""A Valkey that asks for a user, a password and TLS: what is needed, what is told, what is never
shown."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("redis")

from ownerserve.cli.failures import told
from ownerserve.directory.messages import (
    Bind,
    Bound,
    DirectoryRefusal,
    FindSession,
    Leased,
    Outcome,
    Refused,
    Register,
    SessionIs,
)
from ownerserve.directory.opening import opener_of
from ownerserve.directory.valkey.directory import ValkeyDirectory, ValkeyOptions
from ownerserve.directory.valkey.primary import BackendRefused
from ownerserve.directory.valkey.source import parse_source
from ownerserve.kv.errors import InvalidInput, PeerLost
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from tests.support.certificates import Authority
from tests.support.children import ROOT, importing
from tests.support.directory.secured import (
    OPERATOR_PASSWORD,
    PASSWORD,
    RIGHTS,
    USER,
    Secured,
    Sentinel,
    secured,
)
from tests.support.directory.servers import Server, find_binary
from tests.support.net import free_port
from tests.support.waits import until

pytestmark = pytest.mark.skipif(find_binary() is None, reason="no valkey-server or redis-server")

UNIT = RoutingUnit(WorkerId("w"), 0, Incarnation(1))
WRONG = "a wrong p4ssword"


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server(tmp_path: Path, ca: Authority) -> Iterator[Secured]:
    with secured(tmp_path, ca) as one:
        yield one


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    return path


def url_of(server: Secured, password: Path | None, *more: str, user: str = USER) -> str:
    said = [f"ca-file={server.ca.path}", *more]
    said += [] if password is None else [f"password-file={password}"]
    return f"valkeys://{user}@127.0.0.1:{server.port}?{'&'.join(said)}"


def directory_at(url: str) -> ValkeyDirectory:
    return ValkeyDirectory(parse_source(url), ValkeyOptions(lease_s=5.0, timeout_s=10.0))


def serves(directory: ValkeyDirectory) -> None:
    """All that a directory does: read, write, sweep, status, forget."""

    def one(request: object) -> Outcome:
        (outcome,) = directory.execute([request])  # type: ignore[list-item]
        return outcome

    directory.reach()
    assert isinstance(one(Register(UNIT)), Leased)
    until(lambda: isinstance(one(Bind(SessionId("s"), UNIT, None)), Bound))
    found = one(FindSession(SessionId("s"), None))
    assert isinstance(found, SessionIs)
    assert directory.sweep(100) == 0
    status = directory.status()
    assert status.term is not None and status.keys
    assert directory.forget().term is not None
    directory.close()


@pytest.mark.slow
def test_a_user_with_the_least_rights_is_enough(server: Secured, password: Path) -> None:
    serves(directory_at(url_of(server, password)))


def test_the_page_has_these_rights() -> None:
    assert RIGHTS in (ROOT / "docs" / "directory.md").read_text()


@pytest.mark.slow
def test_each_right_is_needed(tmp_path: Path, server: Secured, password: Path) -> None:
    """But for those that are the connection's: none is there for nothing."""
    for right in RIGHTS.split()[2:]:
        if right in ("+ping", "+select", "+wait", "+mset", "+msetnx", "+del", "+unlink"):
            continue
        with server.operator() as operator:
            operator.execute_command("ACL", "SETUSER", USER, f"-{right[1:]}")
        directory = directory_at(url_of(server, password))
        with pytest.raises((AssertionError, PeerLost)):
            directory.reach()
            assert isinstance(directory.execute([Register(UNIT)])[0], Leased)
            assert directory.status().term is not None
            directory.forget()
        directory.close()
        with server.operator() as operator:
            operator.execute_command("ACL", "SETUSER", USER, right)


def test_the_password_may_be_a_variable_and_a_changed_file_is_read_anew(
    server: Secured, password: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWNERSERVE_VALKEY_PASSWORD", PASSWORD)
    directory_at(url_of(server, None)).reach()
    monkeypatch.delenv("OWNERSERVE_VALKEY_PASSWORD")
    password.write_text(WRONG)
    directory = directory_at(url_of(server, password))
    assert directory.execute([Register(UNIT)]) == [Refused(DirectoryRefusal.UNREACHABLE)]
    password.write_text(PASSWORD)
    assert isinstance(directory.execute([Register(UNIT)])[0], Leased)
    directory.close()


@pytest.mark.slow
def test_a_server_that_asks_for_certificates_gets_one(
    tmp_path: Path, ca: Authority, password: Path
) -> None:
    mine = ca.issue("me")
    with secured(tmp_path, ca, "--tls-auth-clients", "yes") as server:
        more = [f"cert-file={mine.certificate}", f"key-file={mine.key}"]
        serves(directory_at(url_of(server, password, *more)))
        with pytest.raises(PeerLost) as refused:
            directory_at(url_of(server, password)).reach()
        assert "cert-file" in str(refused.value)


def lines(error: BackendRefused) -> str:
    said = told(error)
    assert said is not None and "\n" not in said
    for secret in (PASSWORD, WRONG, OPERATOR_PASSWORD):
        assert secret not in said and secret not in repr(error)
    return said


def test_what_only_an_operator_can_mend_is_told_in_one_line(
    tmp_path: Path, server: Secured, password: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, missing, other = tmp_path / "wrong", tmp_path / "none", Authority(tmp_path, "other")
    wrong.write_text(WRONG)
    at, good = f"127.0.0.1:{server.port}", url_of(server, password)
    cases = {
        url_of(server, wrong): "refuses the user or the password; mend USER@ and ?password-file=",
        url_of(server, password, user="nobody"): "refuses the user or the password",
        f"valkeys://{at}?ca-file={server.ca.path}": "refuses the user or the password",
        url_of(server, missing): "none: No such file or directory; put the password alone into it",
        good.replace("ca.pem", "other.pem"): "in certificate chain; name its authority in ?ca-file",
        good.replace(f"ca-file={server.ca.path}&", ""): "name its authority in ?ca-file=",
        good.replace("ca.pem", "nowhere.pem"): "nowhere.pem: No such file or directory; name a",
        good.replace("127.0.0.1", "127.0.0.2").replace(str(server.port), "1"): "",
    }
    assert other.path.exists()
    with caplog.at_level(logging.DEBUG):
        for url, wanted in cases.items():
            directory = directory_at(url)
            if wanted:
                with pytest.raises(BackendRefused) as refused:
                    directory.reach()
                assert wanted in lines(refused.value), url
            else:
                with pytest.raises(PeerLost):
                    directory.reach()
            assert directory.execute([Register(UNIT)]) == [Refused(DirectoryRefusal.UNREACHABLE)]
            directory.close()
    for secret in (PASSWORD, WRONG, OPERATOR_PASSWORD):
        assert secret not in caplog.text
    assert "directory backend lost: valkey at" in caplog.text


def test_tls_to_a_server_without_it_and_none_to_one_with_it_are_told(
    tmp_path: Path, server: Secured, password: Path
) -> None:
    plain = Server(tmp_path)
    try:
        source = parse_source(f"valkeys://127.0.0.1:{plain.port}")
        with pytest.raises(PeerLost, match="if it speaks no TLS write valkey://"):
            ValkeyDirectory(source, ValkeyOptions(timeout_s=1.5)).reach()
    finally:
        plain.stop()
    source = parse_source(f"valkey://127.0.0.1:{server.port}")
    with pytest.raises(PeerLost, match="if it speaks TLS write valkeys://"):
        ValkeyDirectory(source, ValkeyOptions(timeout_s=1.5)).reach()


def test_a_dead_first_address_hides_no_living_second_one(tmp_path: Path) -> None:
    plain = Server(tmp_path)
    try:
        directory_at(f"valkey://127.0.0.1:{free_port()},127.0.0.1:{plain.port}").reach()
    finally:
        plain.stop()


@pytest.mark.slow
def test_sentinel_over_tls_names_the_primary(
    tmp_path: Path, ca: Authority, server: Secured, password: Path
) -> None:
    own, wrong = tmp_path / "sentinel-password", tmp_path / "wrong"
    own.write_text(OPERATOR_PASSWORD)
    wrong.write_text(WRONG)
    sentinel = Sentinel(tmp_path, ca, server)
    try:
        url = f"sentinels://{USER}@127.0.0.1:{sentinel.port}/main?ca-file={ca.path}"
        url += f"&password-file={password}"
        serves(directory_at(f"{url}&sentinel-password-file={own}"))
        for bad in ("", f"&sentinel-password-file={wrong}"):
            with pytest.raises(BackendRefused) as refused:
                directory_at(url + bad).reach()
            assert "refuses the user or the password" in lines(refused.value)
    finally:
        sentinel.stop()


def ran(*words: str, **more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ownerserve.cli.main", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=importing(**more), check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_commands_say_it_and_no_secret(tmp_path: Path, server: Secured, password: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(WRONG)
    code, said = ran("directory", "serve", "--port", "0", "--backend", url_of(server, wrong))
    (line,) = said.splitlines()
    assert code == 2 and line.startswith("error: --backend: valkey at 127.0.0.1:")
    assert "refuses the user or the password; mend USER@" in line and WRONG not in line
    words = ["gateway", "--check", "--worker", "http://127.0.0.1:1", "--directory"]
    code, said = ran(*words, url_of(server, wrong))
    assert code == 1 and "refuses the user or the password" in said and WRONG not in said
    code, said = ran(*words, url_of(server, password))
    assert "ok   directory: answers" in said.splitlines()
    secret = f"valkeys://{USER}:{PASSWORD}@127.0.0.1:{server.port}"
    for command in (["directory", "serve", "--backend", secret], [*words, secret]):
        code, said = ran(*command)
        (line,) = said.splitlines()
        assert code == 2 and "has a password in it" in line and "p4ss" not in line


def test_a_running_directory_shows_no_password_to_the_machine(
    tmp_path: Path, server: Secured, password: Path
) -> None:
    ready, said = tmp_path / "ready", tmp_path / "said"
    words = ["directory", "serve", "--port", "0", "--ready-file", str(ready)]
    command = [sys.executable, "-m", "ownerserve.cli.main", *words]
    with said.open("w") as out:
        process = subprocess.Popen(
            [*command, "--backend", url_of(server, password)],
            stdout=out, stderr=subprocess.STDOUT, env=importing(),
        )  # fmt: skip
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        client = opener_of(ready.read_text().strip())()
        assert client.status().term is not None
        client.close()
        listed = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert str(password).encode() in listed and PASSWORD.encode() not in listed
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert PASSWORD not in said.read_text() and process.returncode == 0


BAD = {
    "valkey://a:1?nothing=x": "behind its ?",
    "valkey://a:1?password-file=": "behind its ?",
    "valkey://a:1?ca-file=x": "write valkeys://",
    "valkey://a:1?password=secret": "has a password in it",
    "valkey://user:secret@a:1": "has a password in it",
    "valkey://:secret@a:1": "has a password in it",
    "secret@a:1": "is no address",
    "http://u:secret@a:1": "has a password in it",
    "sentinels://user:secret@a:1": "has a password in it",
    "sentinels://user@a:1": "is no address",
    "valkeys://a:1/x": "database",
    "valkeys://a": "no HOST:PORT",
}


@pytest.mark.parametrize("url", BAD)
def test_a_url_that_is_none_is_refused_without_what_may_be_secret(url: str) -> None:
    for parse in (parse_source, opener_of):
        with pytest.raises(InvalidInput) as refused:
            parse(url)
        if parse is parse_source:
            assert BAD[url] in str(refused.value)
        assert "secret" not in str(refused.value)


def test_a_source_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    source = parse_source("sentinels://me%40x@a:1,b:2/main?password-file=/p&sentinel-user=s")
    assert (source.scheme, source.is_tls, source.user) == ("sentinel", True, "me@x")
    assert source.addresses == (("a", 1), ("b", 2)) and source.name == "main"
    assert source.password_file == Path("/p") and source.sentinel_user == "s"
    assert parse_source("rediss://a:1").is_tls
    monkeypatch.delenv("OWNERSERVE_VALKEY_PASSWORD", raising=False)
    assert parse_source("valkey://a:1").password() is None
