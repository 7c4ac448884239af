"""Bypass before real workers that own their sessions, as processes: turns go by load alone, to
guests too, and no answer is wrong; what was known before and what was told meanwhile leads back."""

from __future__ import annotations

import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.gateway.test_roster import asked
from tests.gateway.test_shared_directory import directory
from tests.support.gateway.commands import running
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WAIT_S = 300.0
SESSIONS = 6


class Session:
    """A session's prompt of token ids, and where its turns ran."""

    def __init__(self, number: int) -> None:
        self.name = f"s{number}"
        self.prompt = [7 + (13 * number + n) % 200 for n in range(160)]
        self.workers: list[str] = []
        self.reasons: list[str] = []

    def turn(self, url: str) -> None:
        """One turn; its answer is what the same worker computes from the beginning."""
        answer = complete(url, self.prompt, {"x-session-id": self.name})
        self.workers.append(answer.headers["x-ownerserve-worker"])
        self.reasons.append(answer.headers["x-ownerserve-reason"])
        tokens = answer.json()["choices"][0]["token_ids"]
        salt = f"{self.name}/{len(self.workers)}"
        cold = complete(f"http://{self.workers[-1]}", self.prompt, {}, cache_salt=salt)
        assert tokens == cold.json()["choices"][0]["token_ids"]
        assert not cold.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.prompt += tokens + [11 + n % 190 for n in range(48)]


def complete(
    url: str, prompt: list[int], headers: dict[str, str], **more: object
) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer


def test_turns_are_right_in_bypass_and_after_it_while_their_directory_is_gone(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        address, process = stack.enter_context(directory("tcp", tmp_path / "directory"))
        small = ("--model", "tiny-qwen3", "--kv-memory", "8MiB", "--threads", "1")
        workers = []
        for number in range(2):
            words = ("worker", "--port", "0", "--rpc-port", "0", "--worker-id", f"w{number}")
            lines = running(tmp_path / f"worker{number}", *words, *small, "--directory", address)
            workers.append(stack.enter_context(lines)[0][0])
        named = [word for url in workers for word in ("--worker", url)]
        words = ("gateway", "--port", "0", "--admin-port", "0", "--receipts", "open")
        lines = running(tmp_path / "gateway", *words, "--directory", address, *named)
        url, admin = stack.enter_context(lines)[0]

        def told(path: str) -> Any:
            return asked(admin, "GET", path)[1]

        def mode(name: str) -> None:
            assert asked(admin, "PUT", "/mode", {"mode": name})[0] == 200

        sessions = [Session(number) for number in range(SESSIONS)]

        def play(rounds: int) -> None:
            with ThreadPoolExecutor(3) as pool:
                for _ in range(rounds):
                    list(pool.map(lambda one: one.turn(url), sessions))

        def owners() -> int:
            rows = told("/sessions?last=100")["sessions"]
            return sum(row["owner"] is not None for row in rows)

        play(2)
        until(lambda: (play(1), owners() == SESSIONS)[1], within_s=WAIT_S)
        releases = told("/status")["releases"]

        mode("bypass")
        assert isinstance(process, subprocess.Popen)
        process.send_signal(signal.SIGSTOP)  # nobody misses it
        first = {one.name: len(one.workers) for one in sessions}
        play(3)
        bypassed = [(w, r) for one in sessions for w, r in list(
            zip(one.workers, one.reasons, strict=True)
        )[first[one.name]:]]  # fmt: skip
        assert {reason for _, reason in bypassed} == {"least_load"}
        guests = [one for one in sessions if len(set(one.workers[first[one.name] - 1 :])) > 1]
        assert guests, "load alone moves a session, and its turn is a guest's there"
        assert told("/status")["releases"] == releases, "nobody is asked to hand it over"

        process.send_signal(signal.SIGCONT)
        mode("normal")
        homes = {one.name: one.workers[-1] for one in sessions}
        play(1)
        stayed = sum(one.workers[-1] == homes[one.name] for one in sessions)
        assert stayed >= SESSIONS // 2, "its state lies where its last turns ran"
        assert "least_load" not in {one.reasons[-1] for one in sessions}
        until(lambda: (play(1), owners() == SESSIONS)[1], within_s=WAIT_S)
        assert told("/status")["directory"]["state"] == "well"
