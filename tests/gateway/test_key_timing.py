"""What the time of a request tells of a key that is nearly right: nothing. The full form asks the
gateway's own reader so many times, by turns, with a known key's first half and with none of it:

OWNERSERVE_KEY_TIMING=20000 pytest -s tests/gateway/test_key_timing.py
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest

from ownerserve.gateway.http.bodies import BodyBudget
from ownerserve.gateway.http.callers import Caller, KeyedCallers, digest_of
from ownerserve.gateway.http.client import ClientLimits, RequestReader
from ownerserve.gateway.http.replies import Rejected
from tests.support.children import importing

TRIES = int(os.environ.get("OWNERSERVE_KEY_TIMING", "0"))
KEY = "a" * 40


def request(key: str) -> bytes:
    lines = f"Host: t\r\nAuthorization: Bearer {key}\r\nContent-Length: 2"
    return f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n\r\n{{}}".encode()


def limits() -> ClientLimits:
    callers = KeyedCallers({digest_of(KEY.encode()): Caller("acme")})
    return ClientLimits(
        head_max_bytes=65536, body_max_bytes=65536, head_timeout_s=1.0, body_timeout_s=1.0,
        idle_timeout_s=1.0, replaced=frozenset(), callers=callers,
    )  # fmt: skip


def taken_ns(allowed: ClientLimits, sent: bytes, *, refused: bool) -> int:
    reader = RequestReader(allowed, BodyBudget(1 << 20))
    began_ns = time.perf_counter_ns()
    (item,) = reader.feed(sent)
    ended_ns = time.perf_counter_ns()
    assert isinstance(item, Rejected) is refused
    return ended_ns - began_ns


@pytest.mark.parametrize("seed", ["0", "random"])
def test_a_known_head_is_compared_with_no_other_whatever_the_seed(seed: str) -> None:
    """Two processes with a seed in common know the same head by unlike digests."""
    code = (
        "from ownerserve.gateway.http.known_heads import KnownHeads, head_bytes;"
        "from ownerserve.gateway.http.heads import read_request_head;"
        "known = KnownHeads(); known.learn(b'x', read_request_head(b'POST', b'/v1/completions',"
        " b'1.1', headers=[(b'Host', b't')]));"
        "print(known.get(b'x') is not None, known.get(b'y') is None, b'x' in vars(known)['_heads'])"
    )
    told = {**importing(), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=told, check=True)
    assert done.stdout.split() == ["True", "True", "False"]


@pytest.mark.skipif(not TRIES, reason="a measurement: OWNERSERVE_KEY_TIMING=20000")
def test_half_a_key_takes_as_long_as_none() -> None:
    allowed = limits()
    for _ in range(100):
        taken_ns(allowed, request(KEY), refused=False)
    half, none = request(KEY[:20] + "b" * 20), request("b" * 40)
    took: dict[bytes, list[int]] = {half: [], none: []}
    for _ in range(TRIES):
        for one in random.sample([half, none], 2):
            took[one].append(taken_ns(allowed, one, refused=True))
    ranked = sorted((ns, kind) for kind, all_ns in enumerate(took.values()) for ns in all_ns)
    ranks = sum(rank for rank, (_, kind) in enumerate(ranked, 1) if kind)
    auc = (ranks - TRIES * (TRIES + 1) / 2) / TRIES**2
    print(f"\n{TRIES} tries each: AUC {auc:.3f} of half a key against none")
    assert abs(auc - 0.5) <= 0.02
