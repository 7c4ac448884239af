"""Shadow mode, bypass and canary, as an operator turns them on: processes, and the admin port."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.test_roster import asked
from tests.support.gateway.process import GatewayProcess, gateway_process, worker_process
from tests.support.net import free_port

pytestmark = pytest.mark.slow

PATH = "/v1/chat/completions"
OPEN = ("--receipts", "open")


class Agents:
    """Sessions that go on, a few turns at once; each turn is 4,000 bytes longer."""

    def __init__(self, gateway: GatewayProcess, names: Sequence[str], key: str = "none") -> None:
        self._url, self._names, self._key = gateway.data_url, names, key
        self._turns: Counter[str] = Counter()
        self.workers: dict[str, list[str]] = {name: [] for name in names}
        self.reasons: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = 0
        self._lock = threading.Lock()

    def turn(self, name: str) -> None:
        body = {"messages": [{"role": "user", "content": "x" * 4000 * (self._turns[name] + 1)}]}
        headers = {"x-session-id": name, "authorization": f"Bearer {self._key}"}
        answer = httpx.post(
            self._url + PATH, json={**body, "counted": 1}, headers=headers, timeout=60
        )
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        with self._lock:
            self._turns[name] += 1
            self.workers[name].append(answer.headers["x-ownerserve-worker"])
            self.reasons[answer.headers["x-ownerserve-reason"]] += 1
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    def play(self, rounds: int) -> None:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(rounds):
                list(pool.map(self.turn, self._names))


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    """Makes `workers` workers and a gateway over them, with further words."""
    with ExitStack() as stack:

        def start(workers: int, *words: str) -> tuple[GatewayProcess, list[int]]:
            ports = [stack.enter_context(worker_process()).port for _ in range(workers)]
            return stack.enter_context(gateway_process(tmp_path, ports, *OPEN, *words)), ports

        yield start


Start = Callable[..., tuple[GatewayProcess, list[int]]]


def put(gateway: GatewayProcess, path: str, **body: object) -> dict[str, Any]:
    status, said = asked(gateway.admin_url, "PUT", path, body)
    assert status == 200, said
    assert isinstance(said, dict)
    return said


def got(gateway: GatewayProcess, path: str) -> Any:
    status, said = asked(gateway.admin_url, "GET", path)
    assert status == 200
    return said


def test_shadow_mode_does_least_load_and_says_what_ownerserve_would_have_gained(
    fleet: Start,
) -> None:
    gateway, _ = fleet(3, "--mode", "shadow", "--access-log")
    agents = Agents(gateway, [f"s{n}" for n in range(10)])
    agents.play(rounds=5)
    assert agents.reasons == {"least_load": 50}, "nothing else is done"
    assert agents.cached_tokens < 0.9 * agents.prompt_tokens * 4 / 5
    said = got(gateway, "/rollout")
    assert (said["mode"], said["decides"], said["beside"]) == ("shadow", "least_load", "ownerserve")
    shadow = said["shadows"]["ownerserve"]
    assert shadow["compared"] == 50
    assert shadow["agreed"] < 50 and shadow["regret_ms"] > shadow["gain_ms"]
    tokens = shadow["expected_cached_tokens"]
    assert tokens["shadow"] > tokens["live"]
    rows = got(gateway, "/decisions?last=50")["decisions"]
    assert {row["reason"] for row in rows} == {"least_load"}
    beside = [row["shadow"] for row in rows]
    assert all(one["policy"] == "ownerserve" for one in beside)
    assert sum(one["regret_ms"] for one in beside) == pytest.approx(
        shadow["regret_ms"] - shadow["gain_ms"], abs=0.1
    )
    assert sum(one["worker"] != row["worker"] for one, row in zip(beside, rows, strict=True))
    assert "regret_ms=" in gateway.said.read_text(), "the access line says it too"
    metrics = httpx.get(gateway.admin_url + "/metrics").text
    assert 'ownerserve_gateway_mode{mode="shadow"} 1.0' in metrics
    assert 'cheaper="shadow",policy="ownerserve"' in metrics

    put(gateway, "/mode", mode="normal")
    before = agents.cached_tokens
    agents.reasons.clear()
    agents.play(rounds=2)
    assert "least_load" not in agents.reasons
    assert agents.reasons["owner"] >= 10, "the second round at the latest is at the owner"
    assert agents.cached_tokens > before
    assert got(gateway, "/rollout")["beside"] is None


def test_what_the_shadow_foretells_comes_true(tmp_path: Path) -> None:
    """The same sessions before a gateway in shadow mode, and before one that does what the shadow
    would have done."""
    cached: dict[str, float] = {}
    for mode in ("shadow", "normal"):
        with ExitStack() as stack:
            ports = [stack.enter_context(worker_process()).port for _ in range(4)]
            folder = tmp_path / mode
            folder.mkdir()
            gateway = stack.enter_context(gateway_process(folder, ports, *OPEN, "--mode", mode))
            agents = Agents(gateway, [f"s{n}" for n in range(12)])
            agents.play(rounds=6)
            cached[mode] = agents.cached_tokens / agents.prompt_tokens
            if mode == "shadow":
                said = got(gateway, "/rollout")["shadows"]["ownerserve"]
                foretold = said["expected_cached_tokens"]["shadow"] / agents.prompt_tokens
                regret_ms = (said["regret_ms"] - said["gain_ms"]) / said["compared"]
    print(
        f"cached: least load {cached['shadow']:.3f}, foretold {foretold:.3f}, then so"
        f" {cached['normal']:.3f}; regret {regret_ms:.0f} ms a turn"
    )
    assert cached["shadow"] + 0.15 < cached["normal"]
    assert foretold == pytest.approx(cached["normal"], abs=0.08)
    assert regret_ms > 0


def test_a_policy_beside_the_policy(fleet: Start) -> None:
    gateway, _ = fleet(2, "--policy", "round_robin", "--shadow", "ownerserve")
    Agents(gateway, ["a", "b", "c"]).play(rounds=4)
    assert got(gateway, "/rollout")["shadows"]["ownerserve"]["compared"] == 12
    put(gateway, "/shadow", policy=None)
    Agents(gateway, ["a"]).play(rounds=1)
    said = got(gateway, "/rollout")
    assert (said["shadow"], said["shadows"]["ownerserve"]["compared"]) == (None, 12)
    assert got(gateway, "/decisions?last=1")["decisions"][0]["shadow"] is None


def test_bypass_asks_no_directory_and_comes_back(fleet: Start) -> None:
    lost = f"tcp://127.0.0.1:{free_port()}"
    gateway, _ = fleet(2, "--directory", lost, "--mode", "bypass")
    agents = Agents(gateway, [f"s{n}" for n in range(8)])
    agents.play(rounds=2)
    assert agents.reasons == {"least_load": 16}
    status = got(gateway, "/status")
    assert (status["mode"], status["directory"]["state"]) == ("bypass", "not_asked")
    assert status["directory"]["answers"] == {}
    put(gateway, "/mode", mode="normal")
    Agents(gateway, ["new"]).play(rounds=1)
    status = got(gateway, "/status")
    assert status["mode"] == "normal"
    assert status["directory"]["answers"], "it is asked again, and its loss costs no turn"
    put(gateway, "/mode", mode="bypass")
    agents.reasons.clear()
    agents.play(rounds=1)
    assert agents.reasons == {"least_load": 8}


WRONG: dict[str, tuple[str, object, str]] = {
    "mode": ("/mode", {"mode": "of"}, "body"),
    "no mode": ("/mode", {}, "body"),
    "more": ("/mode", {"mode": "bypass", "for": 3}, "body"),
    "policy": ("/shadow", {"policy": "best"}, "shadow"),
    "share": ("/canary", {"share": 1.5}, "canary-share"),
    "words": ("/canary", {"share": "half"}, "body"),
    "its policy": ("/canary", {"policy": "best", "share": 0.5}, "canary-policy"),
}


def test_what_can_not_be_chosen_changes_nothing(fleet: Start) -> None:
    gateway, _ = fleet(1)
    before = got(gateway, "/rollout")
    for path, body, field in WRONG.values():
        status, said = asked(gateway.admin_url, "PUT", path, body)
        assert (status, said["error"]["field"]) == (400, field)
        assert said["error"]["mend"]
    status, said = asked(
        gateway.admin_url, "PUT", "/mode", {"mode": "bypass"}, Origin="http://elsewhere"
    )
    assert status == 403
    assert got(gateway, "/rollout") == before


ACME, GLOBEX = "sk-acme-0123456789", "sk-globex-0123456789"
TENANTS = f"""
secret = "{"s" * 40}"
[tenants.acme]
keys = ["{ACME}"]
canary_share = 1.0
[tenants.globex]
keys = ["{GLOBEX}"]
"""


def test_a_canary_has_a_share_of_each_tenants_sessions_at_its_own_workers(
    tmp_path: Path,
) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    tenants.chmod(0o600)
    with ExitStack() as stack:
        ports = [stack.enter_context(worker_process()).port for _ in range(3)]
        canary = f"http://127.0.0.1:{ports[2]}#canary"
        words = (*OPEN, "--tenants-file", str(tenants), "--worker", canary)
        gateway = stack.enter_context(gateway_process(tmp_path, ports[:2], *words))
        new, old = f"127.0.0.1:{ports[2]}", {f"127.0.0.1:{port}" for port in ports[:2]}

        def workers(agents: Agents) -> dict[str, set[str]]:
            return {name: set(where) for name, where in agents.workers.items()}

        acme = Agents(gateway, [f"a{n}" for n in range(6)], ACME)
        acme.play(rounds=2)
        assert all(where == {new} for where in workers(acme).values())
        globex = Agents(gateway, [f"g{n}" for n in range(40)], GLOBEX)
        globex.play(rounds=1)
        assert set.union(*workers(globex).values()) <= old, "its prompts are alike: one may do"
        said = put(gateway, "/canary", share=0.5)
        assert (said["canary_share"], said["canary_workers"]) == (0.5, [new])
        half = Agents(gateway, [f"g{n}" for n in range(40)], GLOBEX)
        half.play(rounds=3)
        assert all(len({one == new for one in where}) == 1 for where in workers(half).values())
        inside = {name for name, where in workers(half).items() if where == {new}}
        assert 8 <= len(inside) <= 32
        put(gateway, "/canary", share=0.8)
        more = Agents(gateway, [f"g{n}" for n in range(40)], GLOBEX)
        more.play(rounds=1)
        assert inside < {name for name, where in workers(more).items() if where == {new}}

        arms = got(gateway, "/rollout")["arms"]
        turns = 12 + 40 + 120 + 40
        assert sum(arm["ends"]["finished"] for arm in arms.values()) == turns
        assert arms["canary"]["ends"]["finished"] > 12 and arms["canary"]["displaced"] == 0
        assert arms["canary"]["tokens"]["cached"] > 0
        metrics = httpx.get(gateway.admin_url + "/metrics").text
        for arm in ("main", "canary"):
            assert f'ownerserve_gateway_arm_first_byte_seconds_count{{arm="{arm}"}}' in metrics
        rows = got(gateway, "/workers")["workers"]
        assert {row["worker"]: row["arm"] for row in rows}[new] == "canary"

        status, said = asked(gateway.admin_url, "DELETE", f"/workers/{new}")
        assert status == 202
        acme.play(rounds=1)
        assert {where[-1] for where in acme.workers.values()} <= old, "nobody is without a worker"
        assert json.dumps(said)
