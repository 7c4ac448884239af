"""Real Valkey or Redis servers killed, frozen, cut off, flushed and failed over: does an epoch
ever come twice?

    python -m tests.support.directory.failover [ROUNDS] [--sentinel ROUNDS]

Beside every epoch a plain INCR on the same server is noted: what a counter without terms would
have issued twice in the very same round (the control: a test that could not fail shows 0 there).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from ownerserve.directory import messages as ask
from ownerserve.directory.valkey.directory import ValkeyDirectory, ValkeyOptions
from ownerserve.directory.valkey.source import parse_source
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, later
from tests.support.directory.servers import Server, find_binary
from tests.support.net import free_port
from tests.support.waits import WAIT_S

LEASE_S = 0.3
GRANTS = 10
SUBNET = "10.199.77"
CONTROL = "control"


class Site:
    """A network namespace of its own for a server; without root, the host's network."""

    def __init__(self, number: int) -> None:
        self.name, self.address = f"w5dir{os.getpid()}n{number}", f"{SUBNET}.{number + 1}"
        self._link = f"w5v{os.getpid() % 10000}n{number}"

    def open(self, bridge: str) -> None:
        _ip("netns", "add", self.name)
        peer = self._link + "p"
        _ip("link", "add", self._link, "type", "veth", "peer", "name", peer)
        _ip("link", "set", self._link, "master", bridge, "up")
        _ip("link", "set", peer, "netns", self.name)
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", peer),
            ("link", "set", peer, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self.name, *words)

    def close(self) -> None:
        _ip("netns", "del", self.name)

    def cut_off(self, other: Site) -> None:
        _ip("-n", self.name, "route", "add", "blackhole", f"{other.address}/32")

    def join(self, other: Site) -> None:
        _ip("-n", self.name, "route", "del", "blackhole", f"{other.address}/32")


class Sites:
    """Two namespaces on a bridge that the host is on too."""

    def __init__(self) -> None:
        self._bridge = f"w5br{os.getpid() % 10000}"
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{SUBNET}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        self.pair = (Site(0), Site(1))
        for site in self.pair:
            site.open(self._bridge)

    def close(self) -> None:
        for site in self.pair:
            site.close()
        _ip("link", "del", self._bridge)

    @staticmethod
    def possible() -> bool:
        """Root, `ip`, and a kernel that lets us."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            return False
        try:
            _ip("netns", "add", f"w5probe{os.getpid()}")
            _ip("netns", "del", f"w5probe{os.getpid()}")
        except subprocess.CalledProcessError:
            return False
        return True


class Ledger:
    """Every epoch that was acknowledged, and what INCR gave beside it."""

    def __init__(self) -> None:
        self.epochs: Counter[Epoch] = Counter()
        self.control: Counter[int] = Counter()
        self.highest: Epoch | None = None
        self.refused = 0
        self.out_of_order = 0
        self.restored_s: list[float] = []

    def twice(self) -> int:
        return sum(number > 1 for number in self.epochs.values())

    def control_twice(self) -> int:
        return sum(number > 1 for number in self.control.values())


class Pair:
    """A primary and its replica; after a failover they have changed places."""

    def __init__(self, home: Path, sites: Sites | None) -> None:
        self._home = home
        self.sites = sites
        self.servers = [self._start(0), self._start(1)]
        self.first = 0
        self._follow()

    @property
    def primary(self) -> Server:
        return self.servers[self.first]

    @property
    def replica(self) -> Server:
        return self.servers[1 - self.first]

    def restart(self, server: Server) -> None:
        """A new process without any data."""
        server.stop()
        number = self.servers.index(server)
        self.servers[number] = self._start(number)

    def promote(self) -> None:
        """What Sentinel does, at once."""
        self.replica.client().replicaof("NO", "ONE")
        self.first = 1 - self.first

    def repair(self) -> None:
        """The former primary follows the new one."""
        self._follow()

    def settle(self) -> None:
        """Until the replica has all that the primary has, the term above all."""
        client = redis.Redis(
            host=self.primary.host, port=self.primary.port, single_connection_client=True
        )
        client.incr("settled")
        _until(lambda: int(client.wait(1, 1000)) >= 1, WAIT_S)
        client.close()

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def _start(self, number: int) -> Server:
        if self.sites is None:
            return Server(self._home)
        site = self.sites.pair[number]
        prefix = ("ip", "netns", "exec", site.name)
        return Server(self._home, host=site.address, port=7001, prefix=prefix)

    def _follow(self) -> None:
        client = self.replica.client()
        client.replicaof(self.primary.host, self.primary.port)
        _until(lambda: client.info("replication").get("master_link_status") == "up", WAIT_S)
        _until(lambda: self.primary.client().info("replication")["connected_slaves"] >= 1, WAIT_S)
        self.settle()


class Round:
    """Grants before, while cut off, and after; every kind of fault is a method."""

    def __init__(self, pair: Pair, ledger: Ledger, number: int, *, min_replicas: int) -> None:
        self._pair = pair
        self._ledger = ledger
        self._options = ValkeyOptions(
            lease_s=LEASE_S, min_replicas=min_replicas, timeout_s=1.0, wait_s=0.1
        )
        self._number = number
        self._unit = RoutingUnit(WorkerId(f"w{number}"), 0, Incarnation(1))

    def kill(self) -> None:
        """The primary dies with what the frozen replica had not heard of."""
        pair = self._pair
        with self._directory(pair.primary) as old:
            self._grants(old, "before")
            pair.settle()
            pair.replica.freeze()
            self._grants(old, "unheard")
        dead = pair.primary
        dead.kill()
        pair.replica.thaw()
        self._fail_over()
        pair.restart(dead)
        pair.repair()

    def freeze(self) -> None:
        """The primary sleeps through its replacement, then answers as if nothing had been."""
        pair = self._pair
        old_server = pair.primary
        with self._directory(old_server) as old:
            self._grants(old, "before")
            pair.settle()
            old_server.freeze()
            self._fail_over()
            old_server.thaw()
            self._grants(old, "awake", after=False)
        pair.repair()

    def cut(self) -> None:
        """Both live, neither hears the other, clients hear both: two primaries."""
        pair = self._pair
        assert pair.sites is not None
        one, other = pair.sites.pair
        with self._directory(pair.primary) as old:
            self._grants(old, "before")
            pair.settle()
            one.cut_off(other)
            other.cut_off(one)
            self._grants(old, "alone")
            self._fail_over()
            self._grants(old, "still-alone", after=False)
        one.join(other)
        other.join(one)
        pair.repair()

    def flush(self) -> None:
        """The memory is gone and nobody was promoted; workers have seen later epochs."""
        with self._directory(self._pair.primary) as directory:
            self._grants(directory, "before")
            self._pair.primary.client().flushall()
            self._grants(directory, "unseen")
            time.sleep(LEASE_S * 1.2)
            self._grants(directory, "rebuilt")

    def _fail_over(self) -> None:
        began_s = time.monotonic()
        self._pair.promote()
        with self._directory(self._pair.primary, min_replicas=0) as new:
            _until(lambda: self._grants(new, "first", grants=1) > 0, WAIT_S)
            self._ledger.restored_s.append(time.monotonic() - began_s)
            self._grants(new, "after")

    def _grants(
        self, directory: ValkeyDirectory, what: str, *, grants: int = GRANTS, after: bool = True
    ) -> int:
        """Bind sessions; `after`: this side comes after all before, so its epochs must be higher
        (the other one's late ones need not be). How many were granted."""
        ledger = self._ledger
        highest = ledger.highest
        server = self._pair.servers[self._place(directory)]
        known = len(ledger.epochs)
        names = [SessionId(f"{self._number}/{what}/{n}") for n in range(grants)]
        requests = [ask.Bind(name, self._unit, seen=highest if after else None) for name in names]
        for outcome in directory.execute([ask.Register(self._unit), *requests])[1:]:
            if not isinstance(outcome, ask.Bound):
                ledger.refused += 1
                continue
            ledger.epochs[outcome.epoch] += 1
            ledger.highest = later(ledger.highest, outcome.epoch)
            if after and highest is not None and outcome.epoch <= highest:
                ledger.out_of_order += 1
            with contextlib.suppress(redis.exceptions.RedisError):
                ledger.control[server.client(0.5).incr(CONTROL)] += 1
        return len(ledger.epochs) - known

    def _place(self, directory: ValkeyDirectory) -> int:
        address = directory.source.addresses[0]
        return [(one.host, one.port) for one in self._pair.servers].index(address)

    @contextlib.contextmanager
    def _directory(self, server: Server, min_replicas: int | None = None) -> Any:
        options = self._options
        if min_replicas is not None:
            options = ValkeyOptions(lease_s=LEASE_S, min_replicas=min_replicas)
        directory = ValkeyDirectory(parse_source(server.url), options)
        if directory.status().opens_in_s and not self._ledger.epochs:
            time.sleep(LEASE_S * 1.1)  # the very first
        try:
            yield directory
        finally:
            directory.close()


def play(rounds: int, *, min_replicas: int, cut: bool = False) -> Ledger:
    """`rounds` faults, one kind after another."""
    ledger = Ledger()
    sites = Sites() if cut else None
    with tempfile.TemporaryDirectory() as home:
        pair = Pair(Path(home), sites)
        try:
            for number in range(rounds):
                one = Round(pair, ledger, number, min_replicas=min_replicas)
                kinds: list[Callable[[], None]] = [one.kill, one.freeze, one.flush]
                if cut:
                    kinds = [one.cut, one.kill]
                kinds[number % len(kinds)]()
        finally:
            pair.stop()
            if sites is not None:
                sites.close()
    return ledger


def sentinel_rounds(rounds: int) -> Ledger:
    """Three sentinels notice that the primary died: time from the kill to the next grant."""
    ledger = Ledger()
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as home:
            _sentinel_round(Path(home), ledger, number)
    return ledger


def _sentinel_round(home: Path, ledger: Ledger, number: int) -> None:
    pair = Pair(home, None)
    watchers = [_sentinel(home, n, pair.primary.port) for n in range(3)]
    try:
        for port, _ in watchers:
            client = redis.Redis(port=port)
            _until(lambda client=client: _sees_all(client), 120)  # type: ignore[misc]
        url = "sentinel://" + ",".join(f"127.0.0.1:{port}" for port, _ in watchers) + "/directory"
        options = ValkeyOptions(lease_s=LEASE_S, timeout_s=0.5, wait_s=0.1)
        directory = ValkeyDirectory(parse_source(url), options)
        unit = RoutingUnit(WorkerId(f"w{number}"), 0, Incarnation(1))
        directory.status()
        time.sleep(LEASE_S * 1.1)
        _bind_until(directory, unit, ledger, "before")
        began_s = time.monotonic()
        pair.primary.kill()
        _bind_until(directory, unit, ledger, "after")
        ledger.restored_s.append(time.monotonic() - began_s)
        directory.close()
    finally:
        for _, process in watchers:
            process.kill()
            process.wait()
        pair.stop()


def _bind_until(directory: ValkeyDirectory, unit: RoutingUnit, ledger: Ledger, name: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        directory.execute([ask.Register(unit)])
        (outcome,) = directory.execute([ask.Bind(SessionId(name), unit, seen=ledger.highest)])
        if isinstance(outcome, ask.Bound):
            ledger.epochs[outcome.epoch] += 1
            return
        ledger.refused += 1
        time.sleep(0.05)
    raise RuntimeError(f"no grant within {WAIT_S:.0f} s")


def _sentinel(home: Path, number: int, port: int) -> tuple[int, subprocess.Popen[bytes]]:
    binary = find_binary()
    assert binary is not None
    own_port = free_port()
    config = home / f"sentinel{number}.conf"
    config.write_text(
        f"port {own_port}\nsentinel monitor directory 127.0.0.1 {port} 2\n"
        "sentinel down-after-milliseconds directory 1000\n"
        "sentinel failover-timeout directory 3000\n"
    )
    process = subprocess.Popen(
        [binary, str(config), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return own_port, process


def _sees_all(client: Any) -> bool:
    with contextlib.suppress(redis.exceptions.RedisError):
        return "slaves=1,sentinels=3" in client.execute_command("INFO", "sentinel").__str__() or (
            client.info("sentinel")["master0"] | {"slaves": 1, "sentinels": 3}
            == client.info("sentinel")["master0"]
        )
    return False


def _until(ready: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(redis.exceptions.RedisError):
            if ready():
                return
        time.sleep(0.02)
    raise RuntimeError("did not come about in time")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=100)
    parser.add_argument("--sentinel", type=int, default=0, metavar="ROUNDS")
    wanted = parser.parse_args()
    bad = 0
    runs: list[tuple[str, Callable[[], Ledger]]] = []
    for replicas in (0, 1):
        runs.append(
            (
                f"kill, freeze, flush; min_replicas {replicas}",
                lambda replicas=replicas: play(wanted.rounds, min_replicas=replicas),  # type: ignore[misc]
            )
        )
        if Sites.possible():
            runs.append(
                (
                    f"partition, kill; min_replicas {replicas}",
                    lambda replicas=replicas: play(  # type: ignore[misc]
                        wanted.rounds, min_replicas=replicas, cut=True
                    ),
                )
            )
    if wanted.sentinel:
        runs = [("sentinel", lambda: sentinel_rounds(wanted.sentinel))]
    for name, run in runs:
        ledger = run()
        restored = sorted(ledger.restored_s) or [0.0]
        print(
            f"{name}: {sum(ledger.epochs.values())} epochs, {ledger.twice()} issued twice "
            f"(INCR: {ledger.control_twice()}), {ledger.out_of_order} out of order, "
            f"{ledger.refused} refused; grants again after {statistics.median(restored):.3f} s, "
            f"at most {restored[-1]:.3f} s",
            flush=True,
        )
        bad += ledger.twice() + ledger.out_of_order
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
