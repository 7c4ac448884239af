"""vLLM's server or its engine core is killed as one asks the other: the turns after are answered
right, and the session comes to one owner. Real `vllm serve`, a gateway and a directory.

By hand, since each case begins vLLM anew (forked, or each would take minutes):

    OWNERSERVE_ALL_KILLS=1 python -m pytest -m vllm tests/vllm/test_killed_at_lines.py
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from ownerserve.directory import messages as ask
from ownerserve.engines.vllm.scheduler_side.node_rpc import ADDRESS_FILE
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire import rpc
from ownerserve.router.requests.identity import Scope
from tests.support.kills.processes import SESSION_HEADER, metric
from tests.support.kills.wires import At, Lane, Trap, Wires
from tests.support.net import free_port
from tests.support.vllm import connectors, tiny
from tests.support.vllm.installed import distribution
from tests.support.vllm.ownerships import Directory, directory_process
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import Server, WarmServers, gateway
from tests.support.waits import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not os.environ.get("OWNERSERVE_ALL_KILLS"), reason="by hand: OWNERSERVE_ALL_KILLS=1"
    ),
]

LANE = Lane("server", "core")
WITHIN_S = 180.0
ASKED = (rpc.Status, rpc.ListHeld, rpc.Probe, rpc.AskLine)


class Case(NamedTuple):
    """`victim` is killed at a message `tag`, or as its answer passes."""

    tag: str
    victim: str
    at: At

    def __str__(self) -> str:
        return f"{self.tag}-{self.at.value}-{self.victim}"


ALL = [
    Case(str(one.__struct_config__.tag), victim, at)
    for one in ASKED
    for victim in LANE
    for at in At
]


class Vllm:
    """One `vllm serve` at a fixed place, begun again at will from a process that has imported vLLM;
    its API server asks its engine core over a wire that is watched. A context manager."""

    def __init__(self, model: Path, folder: Path, directory: Directory, wires: Wires) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._model, self._folder, self._wires = model, folder, wires
        self._store = folder / "store"
        self._connector = connectors.ours(self._store, directory=directory.address, worker_id="v0")
        self._servers = WarmServers(distribution(folder / "site"), folder / "warm.log")
        self._server: Server | None = None

    def __enter__(self) -> Vllm:
        self._servers.__enter__()
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.__exit__()

    def begin(self) -> None:
        log = self._folder / "vllm.log"
        self._server = self._servers.begin(self._model, self._connector, log, port=self.port)
        address = self._store / ADDRESS_FILE
        until(address.exists, what="the engine core's address")
        own = int(address.read_text().strip().rpartition(":")[2])
        address.write_text(f"tcp://127.0.0.1:{self._wires.lay(own, LANE)}")

    def kill(self, victim: str) -> None:
        """kill -9 to the API server alone, or to its engine core alone."""
        assert self._server is not None
        pid = self._server.pid
        os.kill(pid if victim == "server" else _core_of(pid), signal.SIGKILL)

    def end(self) -> None:
        """kill -9 to what is left of it."""
        assert self._server is not None
        with suppress(ProcessLookupError):
            self._server.kill()
        (self._store / ADDRESS_FILE).unlink(missing_ok=True)


def _core_of(server: int) -> int:
    """The server's child that computes; a name has 15 characters."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    for child in children:
        if "EngineCor" in Path(f"/proc/{child}/comm").read_text():
            return int(child)
    names = [Path(f"/proc/{child}/comm").read_text() for child in children]
    raise AssertionError(f"no engine core among {names}")


class Fleet(NamedTuple):
    """What a case plays with."""

    vllm: Vllm
    directory: Directory
    wires: Wires
    url: str
    admin: str

    def turn(self, session: str, prompt: list[int]) -> list[int] | None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        with suppress(httpx.HTTPError):
            answer = httpx.post(
                f"{self.url}/v1/completions",
                json=body | {"return_token_ids": True},
                headers={SESSION_HEADER: session},
                timeout=60,
            )
            if answer.status_code == 200:
                ids: list[int] = answer.json()["choices"][0]["token_ids"]
                return ids
        return None

    def is_asked_whether(self) -> None:
        """Somebody asks the worker whether it would take a turn."""
        with suppress(httpx.HTTPError):
            httpx.post(f"{self.vllm.url}/ownerserve/admit", json={"tokens": 100}, timeout=10)

    def at_rest(self) -> bool:
        port = int(self.admin.rpartition(":")[2])
        ended = metric(port, "ownerserve_gateway_ends_total") + metric(
            port, "ownerserve_gateway_refusals_total"
        )
        came = metric(port, "ownerserve_gateway_requests_total")
        return not metric(port, "ownerserve_gateway_live") and came == ended


@pytest.fixture(scope="module")
def fleet(shared_rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as all_:
        wires = Wires()
        all_.callback(wires.close)
        directory = all_.enter_context(directory_process(folder))
        vllm = all_.enter_context(Vllm(shared_rig.checkpoint("qwen3"), folder, directory, wires))
        words = ("--directory", directory.address)
        url, admin = all_.enter_context(gateway([vllm.url], folder / "gateway", *words))
        yield Fleet(vllm, directory, wires, url, admin)


def test_every_message_between_them_is_played() -> None:
    assert {case.tag for case in ALL} == {str(one.__struct_config__.tag) for one in ASKED}


@pytest.mark.parametrize("case", ALL, ids=str)
def test_turns_go_on_where_vllm_is_killed_at_a_question(case: Case, fleet: Fleet, rig: Rig) -> None:
    session, prompt = f"{case}", tiny.prompt(200, seed=500 + ALL.index(case))
    name = Scope("-", "tiny").name(SESSION_HEADER, session)

    def has_turn() -> bool:
        """A turn is answered, and as an engine that never saw the session answers it."""
        answer = fleet.turn(session, prompt)
        if answer is None:
            return False
        assert answer == rig.cold("qwen3", prompt, max_tokens=4).tokens
        prompt.extend([*answer, *tiny.prompt(40, seed=len(prompt))])
        return True

    until(has_turn, within_s=WITHIN_S, what="a turn of a fleet that is well")
    until(partial(is_owned, fleet, name), what="its owner to be known")
    before = fleet.directory.known(name)
    trap = Trap(case.tag, case.at, partial(fleet.vllm.kill, case.victim), lane=LANE)
    fleet.wires.trap = trap
    try:
        for _ in range(60):
            fleet.is_asked_whether()
            has_turn()
            if trap.sprung.wait(0.05):
                break
        assert trap.sprung.is_set(), f"{case.tag} was never said"
    finally:
        fleet.wires.trap = None
        fleet.vllm.end()
        fleet.vllm.begin()
    until(has_turn, within_s=WITHIN_S, what="a turn after all")
    until(partial(is_owned, fleet, name), what="it to be owned again")
    after = fleet.directory.known(name)
    assert after.owner.incarnation > before.owner.incarnation and after.epoch > before.epoch
    until(fleet.at_rest, what="every request to end")


def is_owned(fleet: Fleet, name: SessionId) -> bool:
    found = fleet.directory.record(name)
    return isinstance(found, ask.SessionIs) and found.owner_live and found.prefix_hash is not None
