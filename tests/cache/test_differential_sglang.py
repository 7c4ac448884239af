"""Our tree beside SGLang 0.5.23's RadixCache, on the same random operations.

The oracle is SGLang's own code (`RadixCache.create_simulated`) in the optional environment
.venv-sglang (`make bench-envs`); without it these tests skip. One page is one block.

What must agree
  - while nothing was evicted: every matched length, how much of an insert was there already, and
    the tokens resident, evictable and protected;
  - always: what a lock covers stays matchable, and nothing matches that was never inserted.

What differs by design
  - SGLang evicts whole nodes: asked for one page it may free a thousand. Ours frees just what is
    asked. So after the same requests ours keeps at least as many tokens.
  - Which prefixes those are may differ: SGLang refreshes a whole path at a match, we the place
    where a turn ends. A match of ours changes nothing at all; theirs splits nodes.
  - SGLang locks all of the node where a match ended (it splits it there); we the blocks up to
    that depth. In whole pages that is the same.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ownerserve.cache.hetero import HeteroCache, parts_of
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Begun, Turn
from ownerserve.cache.policies.lru import Lru
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import pack
from ownerserve.kv.specs import Coverage

ROOT = Path(__file__).resolve().parents[2]
ORACLE = ROOT / "tests" / "support" / "cache" / "sglang_oracle.py"
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
PAGE = 16
SEEDS = range(12)
STEPS = 120

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-sglang: run `make bench-envs`"),
]


class Sglang:
    """The oracle's process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [str(PYTHON), "-W", "ignore", str(ORACLE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT / "benchmarks"),
            },
        )

    def ask(self, operation: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([operation, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the oracle ended; run tests/support/cache/sglang_oracle.py by hand"
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def sglang() -> Iterator[Sglang]:
    oracle = Sglang()
    yield oracle
    oracle.close()


class Ours:
    """The same operations on a HeteroCache that holds one component."""

    def __init__(self) -> None:
        layout = Layout(PAGE, (Component("kv", Coverage.RANGE, 64, 64),))
        self.cache = HeteroCache(layout, {"kv": 100_000}, 256, Lru())
        self.locks: set[str] = set()
        self._turns = 0

    def match(self, tokens: list[int]) -> int:
        return self.cache.match(pack(tokens)).range_tokens

    def insert(self, tokens: list[int]) -> int:
        """A turn that computes `tokens`; returns what was resident of them before."""
        before = self.match(tokens)
        self._turns += 1
        turn, now = TurnId(str(self._turns)), float(self._turns)
        begun = self.cache.begin(Turn(turn, None, pack(tokens)), now)
        assert isinstance(begun, Begun)
        self.cache.reserve(turn, len(tokens), now)
        self.cache.advance(turn, begun.pending, now)
        self.cache.finish(turn, now)
        return before

    def lock(self, name: str, tokens: list[int]) -> int:
        """A turn that was begun: it holds the path it restores. One token more than the match
        needs, since a turn computes its last one."""
        self._turns += 1
        turn = Turn(TurnId(f"lock {name}"), None, pack([*tokens, 0]))
        begun = self.cache.begin(turn, float(self._turns))
        assert isinstance(begun, Begun)
        self.locks.add(name)
        return begun.restored

    def unlock(self, name: str) -> None:
        self.locks.remove(name)
        self.cache.abort(TurnId(f"lock {name}"), float(self._turns))

    def evict(self, tokens: int) -> int:
        rooms = self.cache.occupancy
        count = min(-(-tokens // PAGE), rooms.evictable_blocks())
        return len(self.cache.pressure.evict_blocks(count)) * PAGE if count else 0

    def sizes(self) -> list[int]:
        tree = parts_of(self.cache).tree
        return [(tree.blocks - tree.protected) * PAGE, tree.protected * PAGE]


class Script:
    """Random prompts that share prefixes, part in the middle of a page, and grow."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: list[list[int]] = [[]]

    def prompt(self) -> list[int]:
        draw = self.random
        base = draw.choice(self.known)
        kept = base[: draw.randint(0, len(base))] if draw.random() < 0.5 else base
        prompt = kept + [draw.randint(0, 3) for _ in range(draw.randint(1, PAGE * 8))]
        self.known.append(prompt)
        return prompt

    def probe(self) -> list[int]:
        draw = self.random
        prompt = draw.choice(self.known[1:] or [[0]])
        return prompt + [9] * draw.randint(0, 2 * PAGE)


def step(script: Script, sglang: Sglang, ours: Ours) -> None:
    """One insert, match, lock or unlock, which must be answered alike."""
    kind = script.random.choice(["insert", "insert", "match", "lock", "unlock"])
    if kind == "unlock" and ours.locks:
        name = script.random.choice(sorted(ours.locks))
        sglang.ask("unlock", name=name)
        ours.unlock(name)
    elif kind == "insert":
        prompt = script.prompt()
        assert sglang.ask("insert", tokens=prompt) == ours.insert(prompt)
    elif kind == "lock":
        prompt, name = script.probe(), str(len(script.known) + script.random.randint(0, 1 << 30))
        if len(prompt) >= PAGE:
            assert sglang.ask("lock", name=name, tokens=prompt) == ours.lock(name, prompt)
    else:
        probe = script.probe()
        assert sglang.ask("match", tokens=probe) == ours.match(probe)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_eviction_every_answer_agrees(sglang: Sglang, seed: int) -> None:
    sglang.ask("reset", page=PAGE)
    ours, script = Ours(), Script(seed)
    for number in range(STEPS):
        step(script, sglang, ours)
        assert sglang.ask("sizes") == ours.sizes()
        if not number % 10:
            ours.cache.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_ours_keeps_at_least_as_much_for_the_same_requests(sglang: Sglang, seed: int) -> None:
    """Rounds of filling alike and then asking both for the same room."""
    sglang.ask("reset", page=PAGE)
    ours, script = Ours(), Script(seed)
    for _ in range(STEPS // 3):
        step(script, sglang, ours)
    for _ in range(20):
        want = script.random.randint(1, 6) * PAGE
        theirs, mine = sglang.ask("evict", tokens=want), ours.evict(want)
        assert mine == want or not ours.sizes()[0], "ours frees just what is asked"
        assert theirs >= want or not sglang.ask("sizes")[0], "SGLang frees whole nodes"
        assert sum(ours.sizes()) >= sum(sglang.ask("sizes"))
        assert sglang.ask("sizes")[1] == ours.sizes()[1], "a lock protects the same in both"
        ours.cache.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_locked_prefix_survives_in_both(sglang: Sglang, seed: int) -> None:
    sglang.ask("reset", page=PAGE)
    ours, script = Ours(), Script(seed)
    prompts = [script.prompt() for _ in range(12)]
    for prompt in prompts:
        sglang.ask("insert", tokens=prompt)
        ours.insert(prompt)
    kept = max(prompts, key=len)
    covered = ours.lock("kept", kept)
    assert sglang.ask("lock", name="kept", tokens=kept) == covered
    everything = sum(ours.sizes())
    sglang.ask("evict", tokens=everything)
    ours.evict(everything)
    assert ours.sizes() == sglang.ask("sizes") == [0, covered]
    assert ours.match(kept) == sglang.ask("match", tokens=kept) == covered
    for prompt in prompts:  # what is left of the others is what they share with the locked one
        assert ours.match(prompt) == sglang.ask("match", tokens=prompt)
