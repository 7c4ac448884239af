"""TLS at the gateway's own ports, as processes: renewals, client certificates, what is refused."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from ownerserve.gateway.http.server_tls import ServerTls, TlsFiles, validity_end
from ownerserve.kv.errors import InvalidInput
from tests.support.certificates import Authority, Pair
from tests.support.children import importing
from tests.support.gateway.process import SHORT, gateway_process, worker_process
from tests.support.waits import until

PATH = "/v1/chat/completions"

pytestmark = pytest.mark.slow


def asked(
    url: str, tls: ssl.SSLContext, method: str = "POST", path: str = PATH, body: bytes = b"{}"
) -> tuple[int, bytes]:
    place = urlsplit(url)
    assert (place.scheme, place.hostname) == ("https", "127.0.0.1")
    connection = http.client.HTTPSConnection("127.0.0.1", place.port, context=tls, timeout=60)
    try:
        connection.request(method, path, body if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def serial(url: str, tls: ssl.SSLContext) -> str:
    """The number of the certificate that is shown there."""
    place = urlsplit(url)
    with (
        socket.create_connection(("127.0.0.1", place.port or 0), timeout=60) as plain,
        tls.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        found: Any = secured.getpeercert()
        return str(found["serialNumber"])


def words(pair: Pair, prefix: str = "") -> list[str]:
    files = {"cert": pair.certificate, "key": pair.key}
    named = [(f"--{prefix}tls-{name}-file", str(path)) for name, path in files.items()]
    return [word for one in named for word in one]


def refuses_others(data: str, ca: Authority) -> None:
    """Nobody who does not believe the authority, speaks in the clear, or is too old gets in."""
    with pytest.raises(ssl.SSLCertVerificationError):
        asked(data, ssl.create_default_context())
    old = ca.client()
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        asked(data, old)
    plain = http.client.HTTPConnection("127.0.0.1", urlsplit(data).port, timeout=60)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.request("GET", "/health")
        plain.getresponse()
    plain.close()


def test_both_ports_speak_tls_and_a_renewed_certificate_is_in_use_without_a_restart(
    tmp_path: Path,
) -> None:
    ca = Authority(tmp_path)
    data_pair, admin_pair = ca.issue("data", "127.0.0.1"), ca.issue("admin", "127.0.0.1")
    believes = ca.client()
    with (
        worker_process() as worker,
        gateway_process(
            tmp_path, [worker.port], *words(data_pair), *words(admin_pair, "admin-")
        ) as gateway,
    ):
        data, admin = gateway.data_url, gateway.admin_url
        assert data.startswith("https://127.0.0.1:") and admin.startswith("https://127.0.0.1:")
        assert asked(data, believes)[0] == 200
        status, streamed = asked(data, believes, path=f"{PATH}?short-stream")
        assert (status, streamed.count(b"word")) == (200, SHORT)
        assert streamed.endswith(b"data: [DONE]\n\n")
        big = b'{"a": "' + b"x" * (4 << 20) + b'"}'
        assert asked(data, believes, body=big)[0] == 200
        status, said = asked(admin, believes, "GET", "/status")
        assert (status, json.loads(said)["workers"][0]["up"]) == (200, True)

        # a refused body is answered too, though nothing half-closes over TLS
        status, said = asked(data, believes, body=b"x" * (33 << 20))
        assert (status, json.loads(said)["error"]["code"]) == (413, "body_too_large")

        refuses_others(data, ca)

        # renewals: of each port, for connections from then on; what is kept goes on
        port = urlsplit(data).port
        kept = http.client.HTTPSConnection("127.0.0.1", port, context=believes, timeout=60)
        kept.request("POST", PATH, b"{}")
        assert kept.getresponse().read()
        for url, pair, name in ((data, data_pair, "data"), (admin, admin_pair, "admin")):
            before = serial(url, believes)
            ca.issue(name, "127.0.0.1", to=pair)
            until(lambda url=url, before=before: serial(url, believes) != before)
            assert asked(url, believes, "GET", "/health")[0] == 200
        kept.request("POST", PATH, b"{}")
        assert kept.getresponse().status == 200
        kept.close()

        # a renewal that can't be read changes nothing, and is told once
        before = serial(data, believes)
        data_pair.key.write_text("half")
        until(lambda: "the certificate of before stays in use" in gateway.said.read_text())
        assert serial(data, believes) == before
        assert asked(data, believes)[0] == 200
        ca.issue("data", "127.0.0.1", to=data_pair)
        until(lambda: serial(data, believes) != before)
        said = gateway.said.read_text()
    assert "Traceback" not in said
    assert "PRIVATE KEY" not in said


def test_who_brings_no_certificate_of_the_clients_authority_is_not_answered(
    tmp_path: Path,
) -> None:
    ca, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    pair, mine = ca.issue("data", "127.0.0.1"), clients.issue("me")
    other = Authority(tmp_path, "others").issue("other")
    more = ["--tls-client-ca-file", str(clients.path), "--host", "0.0.0.0"]
    with (
        worker_process() as worker,
        gateway_process(tmp_path, [worker.port], *words(pair), *more) as gateway,
    ):
        data = gateway.data_url.replace("0.0.0.0", "127.0.0.1")
        assert asked(data, ca.client(mine))[0] == 200
        for wrong in (ca.client(), ca.client(other)):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
                asked(data, wrong)
        admin = http.client.HTTPConnection(urlsplit(gateway.admin_url).netloc, timeout=60)
        admin.request("GET", "/metrics")
        said_of_all = admin.getresponse().read().decode()
        admin.close()
        assert "ownerserve_gateway_handshakes_failed_total 2.0" in said_of_all
        assert 'ownerserve_gateway_certificate_end_timestamp_seconds{port="data"}' in said_of_all
        status, said = 0, b""
        for url in (gateway.admin_url,):
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
            connection.request("GET", "/status")
            answer = connection.getresponse()
            status, said = answer.status, answer.read()
            connection.close()
        assert (status, json.loads(said)["requests"]["received"]) == (200, 1)


def refused(*more: str) -> str:
    """The one line of a gateway that does not start."""
    command = [sys.executable, "-m", "ownerserve.cli.main", "gateway", "--worker", "http://a:1"]
    command += ["--port", "0", "--admin-port", "0", *more]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=importing(), check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


def test_what_is_no_certificate_with_its_key_is_told_in_one_line(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    one, other = ca.issue("one"), ca.issue("other")
    line = refused(*words(Pair(one.certificate, other.key), "admin-"))
    assert line.startswith("error: --admin-tls-cert-file: ") and "KEY_VALUES_MISMATCH" in line
    assert "--tls-cert-file: is missing" in refused("--tls-key-file", str(one.key))


def test_a_key_without_or_behind_a_password_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    pair = ca.issue("one")
    text = pair.key.read_text()
    with pytest.raises(InvalidInput, match="--tls-cert-file"):
        ServerTls(TlsFiles(pair.certificate))  # no key in it
    key: Any = serialization.load_pem_private_key(text.encode(), None)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    pair.key.write_bytes(
        key.private_bytes(pem, form, serialization.BestAvailableEncryption(b"sekret"))
    )
    with pytest.raises(InvalidInput, match="not encrypted"):
        ServerTls(TlsFiles(*pair))
    pair.key.write_text(text)
    both = tmp_path / "both.pem"
    both.write_text(pair.certificate.read_text() + text)
    assert ServerTls(TlsFiles(both)).context
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(InvalidInput, match=r"empty\.pem"):
        ServerTls(TlsFiles(*pair, empty))


def test_the_end_of_a_certificate_is_known_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = Authority(tmp_path)
    with caplog.at_level(logging.WARNING, "ownerserve.gateway"):
        for days in (-0.04, 1, 30, 40 * 365):
            caplog.clear()
            pair = ca.issue("one", ends_in=timedelta(days=days))
            read = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
            tls = ServerTls(TlsFiles(*pair))
            assert tls.ends_at == read.not_valid_after_utc.timestamp()
            tls.look()
            tls.look()
            wanted = {-0.04: ["has run out"], 1: ["runs out"]}.get(days, [])
            assert len(caplog.messages) == len(wanted)
            assert all(word in caplog.text for word in wanted)
        ca.issue("one", ends_in=timedelta(days=1), to=pair)
        tls.look()
        tls.look()
        assert caplog.text.count("runs out") == 1


def test_files_that_come_and_go_while_they_are_looked_at_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewer that takes the certificate away between two looks at it."""
    ca = Authority(tmp_path)
    pair = ca.issue("one")
    tls = ServerTls(TlsFiles(*pair))
    before, text = tls.context, pair.certificate.read_text()
    pair.certificate.unlink()
    tls.look()
    pair.certificate.write_text(text[: len(text) // 2])
    tls.look()
    ca.issue("one", to=pair)

    def gone(path: Path, **_: Any) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", gone)
        tls.look()
    assert tls.context is before
    ca.issue("one", to=pair)
    tls.look()
    assert tls.context is not before


def test_bytes_that_are_no_certificate_have_no_end() -> None:
    for bad in (b"", b"\x30", b"\x30\x82", b"\x30\x03\x30\x01\x00", bytes(100), b"\xff" * 100):
        with pytest.raises((ValueError, IndexError)):
            validity_end(bad)


def test_a_host_off_loopback_still_asks_for_keys_where_tls_asks_for_none(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("one")
    line = refused(*words(pair), "--host", "0.0.0.0")
    assert "reachable from outside" in line


def test_those_who_hang_in_the_handshake_keep_nobody_out(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    pair = ca.issue("data", "127.0.0.1")
    with (
        worker_process() as worker,
        gateway_process(tmp_path, [worker.port], *words(pair), descriptors=256) as gateway,
    ):
        place = urlsplit(gateway.data_url)
        silent = [socket.create_connection(("127.0.0.1", place.port or 0)) for _ in range(120)]
        try:
            began = time.monotonic()
            assert asked(gateway.data_url, ca.client())[0] == 200
            assert time.monotonic() - began < 60
        finally:
            for one in silent:
                one.close()
        assert asked(gateway.data_url, ca.client())[0] == 200
        assert "Traceback" not in gateway.said.read_text()
