"""Workers that are found by a name, over a real DNS server, as processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dns")

import dns.rcode

from ownerserve.gateway.discovery.dns import DnsSource
from ownerserve.gateway.discovery.members import Member
from ownerserve.gateway.discovery.places import (
    DnsPlace,
    DnsServer,
    parse_dns_place,
    parse_dns_server,
)
from ownerserve.gateway.http.access import Address, WorkerTerms
from ownerserve.kv.errors import InvalidInput
from ownerserve.router.messages import Arm
from ownerserve.router.worker import WorkerRole
from tests.gateway.test_roster import PATH, asked, began, served
from tests.support.children import importing
from tests.support.gateway.dns_server import dns_server
from tests.support.gateway.process import SHORT, gateway_process, worker_process
from tests.support.waits import until

pytestmark = pytest.mark.slow

A, SRV = ("vllm.internal.", "A"), ("_vllm._tcp.internal.", "SRV")


def test_workers_join_and_leave_as_the_name_changes(tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = stack.enter_context(dns_server())
        first = stack.enter_context(worker_process())
        second = stack.enter_context(worker_process(host="127.0.0.2", port=first.port))
        assert second.port == first.port
        a, b = f"127.0.0.1:{first.port}", f"127.0.0.2:{first.port}"
        names.records[A] = ["127.0.0.1"]
        more = ["--worker-dns", f"http://vllm.internal:{first.port}", "--receipts", "open"]
        more += ["--dns-server", f"127.0.0.1:{names.port}", "--discovery-interval", "1"]
        gateway = stack.enter_context(gateway_process(tmp_path, [], *more))
        data, admin = gateway.data_url, gateway.admin_url

        def stays() -> dict[str, tuple[str, bool]]:
            rows = asked(admin, "GET", "/workers")[1]["workers"]
            return {row["worker"]: (row["stay"], row["up"]) for row in rows}

        assert stays() == {a: ("serving", True)}, "known before the port was open"

        # a second address joins and gets turns
        names.records[A] = ["127.0.0.1", "127.0.0.2"]
        until(lambda: stays().get(b) == ("serving", True))
        assert set(served(data, 12)) == {a, b}

        # no failure of DNS removes anybody
        for rcode in (dns.rcode.SERVFAIL, dns.rcode.REFUSED, dns.rcode.NXDOMAIN):
            names.rcode = rcode
            names.asked.clear()
            until(lambda: len(names.asked) > 3)
        names.rcode = None
        names.records[A] = []
        until(lambda: "discovery_lost" in gateway.said.read_text())
        assert stays() == {a: ("serving", True), b: ("serving", True)}

        # one leaves in mid-stream: its stream ends whole, and it is forgotten then
        names.records[A] = ["127.0.0.1", "127.0.0.2"]
        until(lambda: "discovery_back" in gateway.said.read_text())
        stream, leaver = stack.enter_context(began(data, f"{PATH}?short-stream"))
        (other,) = {a, b} - {leaver}
        names.records[A] = [other.partition(":")[0]]
        until(lambda: stays().get(leaver, ("gone", False))[0] != "serving")
        assert set(served(data, 6)) == {other}
        told = stream.read().decode()
        assert told.count('"word"') == SHORT and told.endswith("data: [DONE]\n\n")
        until(lambda: leaver not in stays())

        # it comes back
        names.records[A] = ["127.0.0.1", "127.0.0.2"]
        until(lambda: stays().get(leaver) == ("serving", True))
        assert set(served(data, 12)) == {a, b}
        said = gateway.said.read_text()
        assert "Traceback" not in said
        assert 'by="dns vllm.internal"' in said


def test_a_gateway_starts_without_dns_and_finds_its_workers_later(tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = stack.enter_context(dns_server())
        names.is_silent = True
        worker = stack.enter_context(worker_process())
        more = ["--worker-dns", "http://_vllm._tcp.internal=tiny"]
        more += ["--dns-server", f"127.0.0.1:{names.port}", "--discovery-interval", "1"]
        gateway = stack.enter_context(gateway_process(tmp_path, [], *more))
        status, said = asked(gateway.data_url, "POST", PATH, {})
        assert (status, said["error"]["code"]) == (503, "no_worker")
        names.records[SRV] = [f"0 0 {worker.port} localhost."]
        names.is_silent = False
        until(lambda: asked(gateway.data_url, "POST", PATH, {})[0] == 200)
        (row,) = asked(gateway.admin_url, "GET", "/workers")[1]["workers"]
        assert (row["worker"], row["assigned"]) == (f"localhost:{worker.port}", ["tiny"])


def test_check_says_what_a_name_names(tmp_path: Path) -> None:
    def checked(*more: str) -> subprocess.CompletedProcess[str]:
        words = ["gateway", "--check", "--dns-server", f"127.0.0.1:{names.port}", *more]
        command = [sys.executable, "-m", "ownerserve.cli.main", *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=importing(), check=False
        )

    with dns_server() as names, worker_process() as worker:
        names.records[A] = ["127.0.0.1"]
        done = checked("--worker-dns", f"http://vllm.internal:{worker.port}")
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        assert "ok   dns vllm.internal: names 1 worker" in lines
        assert any(line.startswith(f"ok   worker 127.0.0.1:{worker.port}: up") for line in lines)
        done = checked("--worker-dns", "http://nobody.internal:80")
        assert done.returncode == 1
        assert "FAIL dns nobody.internal: no such name" in done.stdout.splitlines()


def first(source: DnsSource, times: int = 1) -> list[Any]:
    """The first words of a source: whom it names, or why it can't say."""

    async def drive() -> list[Any]:
        words: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(source.watch(words.put_nowait, words.put_nowait))
        try:
            return [await asyncio.wait_for(words.get(), 60) for _ in range(times)]
        finally:
            task.cancel()

    return asyncio.run(drive())


def source(port: int, url: str = "http://vllm.internal:80") -> DnsSource:
    return DnsSource(parse_dns_place(url), latest_s=1.0, server=DnsServer("127.0.0.1", port))


def test_addresses_of_both_families_are_one_worker_each() -> None:
    with dns_server() as names:
        names.records = {A: ["10.0.0.2", "10.0.0.1"], (A[0], "AAAA"): ["fd00::1", "fd00::2"]}
        assert first(source(names.port)) == [
            [Member(Address("10.0.0.1", 80)), Member(Address("10.0.0.2", 80))]
        ]
        del names.records[A]
        (found,) = first(source(names.port))
        assert [one.address.worker for one in found] == ["fd00::1:80", "fd00::2:80"]


def test_an_https_worker_that_was_found_must_prove_the_name() -> None:
    with dns_server() as names:
        names.records = {A: ["10.0.0.1"], SRV: ["0 0 8443 one.internal.", "0 0 8443 two.internal."]}
        (found,) = first(source(names.port, "https://vllm.internal:443"))
        assert found[0].address.certified == "vllm.internal"
        (found,) = first(source(names.port, "https://_vllm._tcp.internal"))
        assert {one.address.host for one in found} == {"one.internal", "two.internal"}


def test_an_answer_that_is_too_long_for_a_datagram_is_asked_for_again() -> None:
    with dns_server() as names:
        names.records[A] = [f"10.0.{n}.1" for n in range(200)]
        names.is_short = True
        (found,) = first(source(names.port))
        assert len(found) == 200


def test_who_is_missing_once_is_still_named_and_twice_is_not() -> None:
    """Some servers answer with a part of what they know, in turns."""
    with dns_server() as names:
        names.records[A] = ["10.0.0.1", "10.0.0.2"]
        one = source(names.port)

        async def drive() -> list[int]:
            counts: list[int] = []

            def heard(members: Any) -> None:
                counts.append(len(members))
                names.records[A] = ["10.0.0.1"]

            task = asyncio.create_task(one.watch(heard, lambda why: None))
            while len(counts) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            return counts[:3]

        assert asyncio.run(drive()) == [2, 2, 1]


@pytest.mark.parametrize(
    "bad",
    ["vllm:80", "http://vllm", "http://:80", "http://vllm:0", "http://vllm:x", "ftp://vllm:80",
     "http://_vllm._tcp.internal:80", "http://a b:80", "http://a..b:80", "http://vllm:80=",
     "http://vllm:80/path"],
)  # fmt: skip
def test_what_names_nothing_is_refused(bad: str) -> None:
    with pytest.raises(InvalidInput, match="--worker-dns"):
        parse_dns_place(bad)


def test_places_and_servers_are_read() -> None:
    terms = WorkerTerms(("a", "b"), WorkerRole.PREFILL, Arm.CANARY)
    assert parse_dns_place("prefill+http://vllm:80#canary=a, b") == DnsPlace(
        "http", "vllm", 80, terms
    )
    plain = WorkerTerms((), None, Arm.MAIN)
    assert parse_dns_place("https://_v._tcp.x") == DnsPlace("https", "_v._tcp.x", None, plain)
    assert parse_dns_server("10.0.0.2") == DnsServer("10.0.0.2", 53)
    assert parse_dns_server("[::1]:5353") == DnsServer("::1", 5353)
    for bad in ("dns.internal", "10.0.0.2:x", "10.0.0.2:0", ""):
        with pytest.raises(InvalidInput, match="--dns-server"):
            parse_dns_server(bad)


def test_a_name_that_is_given_twice_is_refused() -> None:
    words = ["--worker-dns", "http://a:1", "--worker-dns", "http://a:2"]
    command = [sys.executable, "-m", "ownerserve.cli.main", "gateway", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=importing(), check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: worker: dns a is given twice; give it once\n"
