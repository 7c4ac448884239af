"""The turns that every system is measured on. Standard library only: runs in any environment.

    prompt i    |<------------- history ------------->|<- new 713 ->|
    answer i                                                        |kept 60|dropped 60|
    prompt i+1  |<--------------------- history ------------------->|kept 60|<- new 713 ->|

An agent drops a little of each answer from its next prompt, so every turn leaves a dead branch.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from time import thread_time
from typing import NamedTuple

BLOCK = 64
NEW, KEPT, DROPPED = 713, 60, 60
STEP = NEW + KEPT
VOCABULARY = 150_000

SESSIONS, SESSION_TOKENS = 200, 6400
"""What the eviction benchmark fills the cache with: idle sessions of 100 blocks."""


class Turn(NamedTuple):
    """One request. `is_measured` False: it only grows the session to its length."""

    number: int
    prompt: list[int]
    answer: list[int]
    is_measured: bool


def grown(context: int, measured: int) -> Iterator[Turn]:
    """A session grown by turns; the `measured` last ones lie around `context` tokens."""
    source = random.Random(context)
    first = max(0, round((context - NEW) / STEP) - measured // 2)
    history = source.choices(range(VOCABULARY), k=NEW)
    for number in range(first + measured):
        answer = source.choices(range(VOCABULARY), k=KEPT + DROPPED)
        yield Turn(number, history[:], answer, number >= first)
        history += answer[:KEPT] + source.choices(range(VOCABULARY), k=NEW)


def clock() -> float:
    """CPU seconds of this thread, read when the collector has been told to pass over everything
    older: it would walk the recipe's own lists of 100,000 tokens inside the clock."""
    gc.freeze()
    return thread_time()


def idle_sessions() -> Iterator[list[int]]:
    """Prompts of sessions that share nothing."""
    source = random.Random(7)
    for _ in range(SESSIONS):
        yield source.choices(range(VOCABULARY), k=SESSION_TOKENS)
