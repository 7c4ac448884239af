"""Real Valkey or Redis servers that ask: for a user and a password, over TLS."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis

from tests.support.certificates import Authority, Pair
from tests.support.directory.servers import find_binary
from tests.support.net import free_port

USER, PASSWORD = "owner", "p4ss w&rd?=%:@#"
OPERATOR_PASSWORD = "the operator's own"
RIGHTS = (
    "-@all ~ownerserve:* +evalsha +script|load +mget +mset +msetnx +del +unlink +scan +dbsize"
    " +hget +hset +hmget +hincrby +role +info +time +wait +select +ping"
)
"""As docs/directory.md has them: a test holds the page to it."""


class Secured:
    """A server over TLS with the user `owner`, whose default user asks for a password too."""

    def __init__(self, folder: Path, ca: Authority, *, rights: str, more: Sequence[str]) -> None:
        self.ca, self.port = ca, free_port()
        self._folder = folder
        own = ca.issue(f"valkey-{self.port}", "localhost", "127.0.0.1")
        acl = folder / f"users-{self.port}.acl"
        acl.write_text(
            f"user {USER} on #{_digest(PASSWORD)} {rights}\n"
            f"user default on #{_digest(OPERATOR_PASSWORD)} ~* &* +@all\n"
        )
        self.start(own, ("--aclfile", str(acl), "--save", "", *more))

    def start(self, own: Pair, more: Sequence[str]) -> None:
        binary = find_binary()
        assert binary is not None
        command = [
            binary, "--port", "0", "--tls-port", str(self.port), "--bind", "127.0.0.1",
            "--tls-cert-file", str(own.certificate), "--tls-key-file", str(own.key),
            "--tls-ca-cert-file", str(self.ca.path), "--dir", str(self._folder), *more,
        ]  # fmt: skip
        if "--tls-auth-clients" not in more:
            command += ["--tls-auth-clients", "no"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            with contextlib.suppress(redis.exceptions.RedisError), self.operator() as client:
                client.ping()
                return
            assert self._process.poll() is None, "the server did not start"
            time.sleep(0.02)
        raise AssertionError("the server did not start")

    def operator(self) -> redis.Redis:
        """A client that may do all."""
        mine = self.ca.issue(f"operator-{self.port}")
        return redis.Redis(
            host="127.0.0.1", port=self.port, password=OPERATOR_PASSWORD, ssl=True,
            ssl_ca_certs=str(self.ca.path), ssl_certfile=str(mine.certificate),
            ssl_keyfile=str(mine.key),
        )  # fmt: skip

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _digest(password: str) -> str:

    return hashlib.sha256(password.encode()).hexdigest()


@contextlib.contextmanager
def secured(folder: Path, ca: Authority, *more: str, rights: str = RIGHTS) -> Iterator[Secured]:
    """A server that asks, until the end."""
    server = Secured(folder, ca, rights=rights, more=more)
    try:
        yield server
    finally:
        server.stop()


class Sentinel:
    """A Sentinel over TLS that asks for a password and knows one primary, `main`."""

    def __init__(self, folder: Path, ca: Authority, primary: Secured) -> None:
        self.port = free_port()
        own = ca.issue(f"sentinel-{self.port}", "localhost", "127.0.0.1")
        config = folder / f"sentinel-{self.port}.conf"
        config.write_text(
            f"port 0\ntls-port {self.port}\nbind 127.0.0.1\ndir {folder}\n"
            f"tls-cert-file {own.certificate}\ntls-key-file {own.key}\n"
            f"tls-ca-cert-file {ca.path}\ntls-auth-clients no\ntls-replication yes\n"
            f'requirepass "{OPERATOR_PASSWORD}"\n'
            f"sentinel monitor main 127.0.0.1 {primary.port} 1\n"
            f'sentinel auth-pass main "{OPERATOR_PASSWORD}"\n'
        )
        binary = find_binary()
        assert binary is not None
        self._process = subprocess.Popen(
            [binary, str(config), "--sentinel"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            with contextlib.suppress(redis.exceptions.RedisError):
                client = redis.Redis(
                    host="127.0.0.1", port=self.port, password=OPERATOR_PASSWORD, ssl=True,
                    ssl_ca_certs=str(ca.path),
                )  # fmt: skip
                with client:
                    client.ping()
                return
            assert self._process.poll() is None, "Sentinel did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
