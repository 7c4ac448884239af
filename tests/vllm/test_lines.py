"""The protocol's lines of servers of several ranks: each answer and `/health` say them once, of the
engine core that did the turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.kv.messages import ExecutionMode
from ownerserve.kv.prefix import HashedPrefix, pack
from ownerserve.kv.wire.headers import (
    ANSWER_HEADER,
    ENGINE_SESSION_HEADER,
    TURN_HEADER,
    AnswerLine,
    TurnLine,
    encode_turn_line,
    read_answer_line,
)
from tests.support.vllm import connectors, tiny
from tests.support.vllm.ownerships import Directory, directory_process
from tests.support.vllm.rig import Rig
from tests.support.vllm.serving import WarmServers
from tests.support.waits import until

pytestmark = pytest.mark.vllm

B = 32
PROMPT_TOKENS = 300


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with directory_process(tmp_path) as one:
        yield one


def line_of(answer: httpx.Response) -> AnswerLine:
    """The line of an answer that says it once, and all of it well."""
    [said] = answer.headers.get_list(ANSWER_HEADER)
    read = read_answer_line(said.encode())
    assert not read.refused
    return read.line


class Session:
    """Turns as a gateway sends them, to one data-parallel rank where there are several."""

    def __init__(self, url: str, digit: str, **headers: str) -> None:
        self.url, self.name = url, SessionId(digit * 32)
        self._headers = headers
        self._prompt = tiny.prompt(PROMPT_TOKENS, seed=int(digit))
        self._turns = 0

    def tip_at(self, tokens: int) -> str:
        """What the chain of the session's first tokens ends in."""
        chain = HashedPrefix(B)
        chain.grow(pack(self._prompt[:tokens]))
        return chain.digests[-1].hex()

    def turn(self) -> AnswerLine:
        self._turns += 1
        told = {
            TURN_HEADER: encode_turn_line(TurnLine(name=self.name)).decode(),
            ENGINE_SESSION_HEADER: self.name,
            "x-request-id": f"turn-{self._turns}-of-{self.name}",
        }
        body: dict[str, Any] = {"model": "tiny", "prompt": self._prompt, "max_tokens": 4}
        answer = httpx.post(
            f"{self.url}/v1/completions",
            json=body,
            headers=told | self._headers,
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        self._prompt += tiny.prompt(40, seed=len(self._prompt))
        return line_of(answer)


def two_turns(session: Session, directory: Directory, *, rank: int) -> AnswerLine:
    """The second's line; its version may count the second turn too, whose end is told as the answer
    is written."""
    first = session.turn()
    assert first.mode is ExecutionMode.COLD_PREFILL
    until(lambda: directory.version(session.name) == 1, what="its first turn")
    line = session.turn()
    assert line.unit is not None and line.load is not None
    assert (line.unit.worker, line.unit.dp_rank) == (WorkerId("w"), rank)
    assert line.unit == first.unit and line.unit.incarnation > 0
    assert line.load.as_of_s > 0 and line.load.kv_bytes_total > 0
    assert line.owner == line.unit and line.version in (1, 2) and line.epoch is not None
    assert line.mode is ExecutionMode.DIRECT_APPEND and line.lost_tokens == 0
    assert line.tokens == (PROMPT_TOKENS + 40) // B * B
    until(lambda: directory.version(session.name) == 2, what="its second turn")
    record = directory.known(session.name)
    assert record.owner == line.unit and record.tokens == line.tokens
    assert line.tip == session.tip_at(line.tokens)
    return line


def test_two_tensor_parallel_ranks_say_one_line(
    rig: Rig, warm: WarmServers, store: Path, tmp_path: Path, directory: Directory
) -> None:
    connector = connectors.ours(store, worker_id="w", directory=directory.address)
    log = tmp_path / "vllm.log"
    with warm.serve(
        rig.checkpoint("qwen3"), connector, log, "--tensor-parallel-size", "2"
    ) as server:
        line = two_turns(Session(server.url, "1"), directory, rank=0)
        on_health = line_of(httpx.get(f"{server.url}/health", timeout=30))
        assert on_health.unit == line.unit and on_health.load is not None
        assert (on_health.owner, on_health.tip, on_health.mode) == (None, None, None)
        status = httpx.get(f"{server.url}/ownerserve/status", timeout=30).json()
        assert status["unit"]["incarnation"] == line.unit.incarnation


def test_each_data_parallel_rank_says_its_own(
    rig: Rig, warm: WarmServers, store: Path, tmp_path: Path, directory: Directory
) -> None:
    connector = connectors.ours(store, worker_id="w", directory=directory.address)
    log = tmp_path / "vllm.log"
    with warm.serve(rig.checkpoint("qwen3"), connector, log, "--data-parallel-size", "2") as server:
        lines = [
            two_turns(
                Session(server.url, f"{rank + 1}", **{"x-data-parallel-rank": f"{rank}"}),
                directory,
                rank=rank,
            )
            for rank in range(2)
        ]
        assert len({line.unit.incarnation for line in lines if line.unit is not None}) == 2
