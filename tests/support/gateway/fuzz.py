"""Damaged requests and answers, by a seed: what a client or a worker may send, bent and cut."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from ownerserve.gateway.asking import Asking
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.bodies import BodyBudget
from ownerserve.gateway.http.client import HttpRequest, RequestReader
from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.http.upstream import AnswerReader, Malformed
from ownerserve.gateway.stamps import answer_of, read_stamp, refusal_of
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from ownerserve.kv.wire.headers import AnswerLine, encode_answer_line
from ownerserve.router.requests.body import place_of_prompt, scan_response_id, scan_usage
from tests.support.router.answer_lines import LIFE, said

_WORDS: tuple[bytes, ...] = (
    *(b"\xff\xfe", b"\0", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\\", b'"', b"{", b"}", b"["),
    *(b"nan", b"NaN", b"-inf", b"1e999", b"-0", b"9" * 400, b"null", b"true", b":", b",", b" "),
    *(b"\r\n", b"\n", b"\r\n\r\n", b"\t", b";", b"%2e", b"..", b"//", b"?", b"HTTP/2.0", b"TRACE"),
    *(b"session_id", b'"session_id": "a"', b'"model": "m"', b'"usage":', b"resp_", b"chunked"),
    *(b"content-length: 5", b"transfer-encoding: chunked", b"x-session-id: a", b"host: b"),
    *(b"x-ownerserve-answer: {}", b"x-ownerserve-refusal: no_room", b"expect: 100-continue"),
)
"""What a bend puts in: damaged text, numbers that are none, marks of JSON and of HTTP."""

_BODIES = (
    {"model": "m", "user": "u", "messages": [{"role": "user", "content": "hello " * 300}]},
    {"model": "m", "prompt_cache_key": "k", "prompt": "text", "stream": True},
    {"session_id": "s", "input": [{"type": "image"}], "previous_response_id": "resp_1"},
    {"metadata": {"user_id": "user_1_session_ab"}, "system": "be", "messages": [], "tools": [{}]},
    {"vllm_xargs": {"session_id": "v"}, "messages": [{"content": [{"type": "text"}]}]},
)
_HEADS = (
    b"x-session-id: one\r\n",
    b"x-claude-code-session-id: c\r\nx-claude-code-agent-id: a\r\n",
    b"thread-id: t\r\nx-codex-parent-thread-id: p\r\n",
    b"x-ownerserve-group: g\r\nx-ownerserve-session-final: true\r\nauthorization: Bearer k\r\n",
    b"",
)
_USAGES = (
    b'{"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}',
    b'{"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 1}',
)
_UNIT = RoutingUnit(WorkerId("w"), 0, Incarnation(LIFE))
_LINES = (
    said()["x-ownerserve-answer"].encode(),
    said(tip="ab" * 32, tokens=64, mode="reseed", lost_tokens=3)["x-ownerserve-answer"].encode(),
    encode_answer_line(AnswerLine(unit=_UNIT, owner=_UNIT, epoch=Epoch(Term(1, 2), 3), version=4)),
)


class Fuzz:
    """A fuzz gives damaged input to what reads it, and counts what became of it. Anything that
    those readers raise, but for their own refusals, comes out of `one`."""

    def __init__(self) -> None:
        self.came: Counter[str] = Counter()
        self._asking = Asking(resolve=lambda name: name, is_known=lambda _: False)
        self._asking.serves(frozenset({"m", "n"}))
        self._limits = Config(workers=()).limits

    def one(self, seed: int) -> None:
        """Play one case."""
        rng = random.Random(seed)
        rng.choice((self._request, self._answer))(rng)

    def _request(self, rng: random.Random) -> None:
        body = json.dumps(rng.choice(_BODIES)).encode()
        if rng.random() < 0.7:
            body = bent(body, rng)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n%b" % rng.choice(_HEADS)
        if rng.random() < 0.4:
            head = bent(head, rng)
        length = b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(body)
        reader = RequestReader(self._limits, BodyBudget(1 << 30))
        for item in _in_pieces(reader.feed, head + length + body, rng):
            self._read(item)

    def _read(self, item: HttpRequest | Rejected) -> None:
        if isinstance(item, Rejected):
            self.came[item.code] += 1
            return
        try:
            asked = self._asking.read(item)
        except Rejected as rejected:
            self.came[rejected.code] += 1
            return
        place_of_prompt(asked.fields)
        self._asking.ended(asked.identity)
        self.came["read"] += 1

    def _answer(self, rng: random.Random) -> None:
        line = bent(rng.choice(_LINES), rng) if rng.random() < 0.8 else rng.choice(_LINES)
        body = b'{"id": "resp_1", "usage": %b}' % bent(rng.choice(_USAGES), rng)
        status = rng.choice((b"200", b"429", b"503", b"409"))
        head = b"HTTP/1.1 %b X\r\nx-ownerserve-answer: %b\r\ncontent-length: %d\r\n\r\n"
        data = head % (status, line, len(body)) + body
        if rng.random() < 0.2:
            data = bent(data, rng)
        reader = AnswerReader()
        reader.begin(b"POST")
        try:
            _in_pieces(partial(_take, reader), data, rng)
        except Malformed:
            self.came["malformed"] += 1
            return
        scan_usage(reader.payload.tail)
        scan_response_id(reader.payload.tail)
        if (found := reader.head) is None:
            self.came["no head"] += 1
            return
        refused: Counter[str] = Counter()
        stamp = read_stamp(WorkerId("w"), found.stamp, refused)
        refusal_of(found.status, found.stamp)
        answer_of(found.status, stamp)
        self.came["a field refused" if refused else "answer"] += 1


def bent(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one to three places replaced, cut out or doubled."""
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((0, 1, 2, 8)))
        match rng.randrange(4):
            case 0 | 1:
                data = data[:start] + rng.choice(_WORDS) + data[end:]
            case 2:
                data = data[:start] + bytes((rng.randrange(256),)) + data[end:]
            case _:
                data = data[:end] + data[start:]
    return data


def _take(reader: AnswerReader, data: bytes) -> list[HttpRequest | Rejected]:
    if reader.head is None:
        reader.feed_head(data)
    else:
        reader.feed_body(data)
    return []


def _in_pieces(
    feed: Callable[[bytes], list[HttpRequest | Rejected]], data: bytes, rng: random.Random
) -> list[HttpRequest | Rejected]:
    """Feed `data` whole or in two pieces."""
    at = rng.choice((0, rng.randrange(len(data) + 1)))
    items = feed(data[:at]) if at else []
    return items + feed(data[at:])
