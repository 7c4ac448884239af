"""Agents of a soak: each plays one conversation after another through the gateway, and knows what
every turn has to answer.

Conversations are few and said again and again under new sessions' names: what is stored of them is
the same each time, so a store that grows for ever leaks.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx

from tests.support.kills.processes import Fleet, Member
from tests.support.kills.wires import WAIT_S
from tests.support.waits import LOOK_S

CONVERSATIONS = 6
TURNS = 5
FIRST_TOKENS, TURN_TOKENS = 120, 24
PAUSE_S = 0.2
"""An agent's tool takes so long at most: turns come and sessions lie idle."""


class Cold:
    """A worker of its own that no fault and no session reaches: what it answers is right."""

    def __init__(self, folder: Path) -> None:
        given = "worker --model tiny-qwen3 --kv-memory 8MiB --threads 1 --port 0"
        self._member = Member("cold", folder, given.split())
        self._ready = folder / "cold.ready"
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._member.begin()
        self._member.await_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._member.terminate()

    def answer(self, prompt: list[int]) -> list[int]:
        with self._lock:
            known = self._answers.get(tuple(prompt))
            if known is None:
                url = f"{self._ready.read_text().strip()}/v1/completions"
                body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
                body |= {"return_token_ids": True}
                found = httpx.post(url, json=body, timeout=WAIT_S).json()
                known = self._answers[tuple(prompt)] = found["choices"][0]["token_ids"]
            return known


class Agents:
    """So many threads, each an agent. `counts`: turns by what came of them; `wrong`: each answer
    that was not the right one, in words."""

    def __init__(
        self, fleet: Fleet, right: Callable[[list[int]], list[int]], *, agents: int, seed: int
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._fleet, self._right = fleet, right
        self._stopped = threading.Event()
        self._faults: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(number, seed)) for number in range(agents)
        ]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Each plays its conversation to its end, which needs a fleet that lives. Raises what ended
        an agent before its time."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self._faults:
            raise self._faults[0]

    def check(self) -> None:
        """Raises what ended an agent."""
        if self._faults:
            raise self._faults[0]

    def _guarded(self, number: int, seed: int) -> None:
        try:
            self._play(number, random.Random(f"{seed}/{number}"))
        except BaseException as error:  # noqa: BLE001 - a thread's root; `stop` raises it
            self._faults.append(error)

    def _play(self, number: int, chance: random.Random) -> None:
        told = 0
        while not self._stopped.is_set():
            told += 1
            said = chance.randrange(CONVERSATIONS)
            prompt = [3 + said, *(5 + n % 90 for n in range(FIRST_TOKENS))]
            for turn in range(TURNS):
                answer = self._turn(f"agent{number}-{told}", prompt, turn == TURNS - 1)
                prompt = [*prompt, *answer, *range(70, 70 + TURN_TOKENS)]
                self._stopped.wait(chance.random() * PAUSE_S)

    def _turn(self, session: str, prompt: list[int], is_last: bool) -> list[int]:
        """A turn, asked until it is answered; returns the right answer."""
        right = self._right(prompt)
        while True:
            answer = self._fleet.turn(session, prompt, final=is_last)
            if answer is not None:
                break
            self.counts["refused"] += 1  # whoever should answer is dead, and begins again
            threading.Event().wait(LOOK_S * 10)
        self.counts["answered"] += 1
        if answer != right:
            self.wrong.append(f"{session}, {len(prompt)} tokens: {answer}, and right is {right}")
        return right
