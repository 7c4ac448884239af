"""What an answer says of its own size: read, believed or refused, and what is learnt from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.gateway.http.payload import AnswerPayload
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.router.messages import Arrive, Dispatch, Done, FirstByte, WorkerUp
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import (
    BYTES_PER_TOKEN_MAX,
    BYTES_PER_TOKEN_MIN,
    TAIL_BYTES,
    TOKENS_MAX,
    Prompt,
    Usage,
    believed,
    place_of_prompt,
    scan,
    scan_usage,
)
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Profile
from tests.support.examples import LETTERS, examples
from tests.support.gateway.world import Play

World = Any
S = SessionId("s")
HUGE = 10**400


def fleet(sequence_tokens: int = 0) -> RouterState:
    state = RouterState(make_policy("ownerserve"))
    profile = Profile(sequence_tokens=sequence_tokens)
    for name in ("w0", "w1"):
        state.handle(WorkerUp(WorkerId(name), 0, Incarnation(1), profile), 0.0)
    return state


def turn(
    state: RouterState, size: int, usage: Usage | None, prompt: Prompt = Prompt.IN_BODY
) -> Dispatch:
    dispatch = state.handle(Arrive(S, size), 1.0)
    assert isinstance(dispatch, Dispatch)
    state.handle(FirstByte(dispatch.receipt), 2.0)
    state.handle(Done(dispatch.receipt, usage, prompt=prompt), 3.0)
    state.check()
    return dispatch


def test_a_prompt_that_is_not_in_the_body_teaches_nothing_of_bytes() -> None:
    """28 bytes that name a former answer of 100,000 tokens; then a plain body of 400 KB."""
    state = fleet()
    turn(state, 28, Usage(100_000, 10, 0), Prompt.ELSEWHERE)
    assert turn(state, 400_000, None).prompt_tokens == 100_000
    state = fleet()
    turn(state, 28, Usage(100_000, 10, 0))  # whatever is claimed, it can't be in 28 bytes
    assert turn(state, 400_000, None).prompt_tokens == 100_000


def test_an_image_in_the_body_does_not_make_text_light() -> None:
    state = fleet()
    turn(state, 4_000_000, Usage(2000, 10, 0))
    assert turn(state, 400_000, None).prompt_tokens == 400_000 / BYTES_PER_TOKEN_MAX


@pytest.mark.parametrize(
    "usage",
    [
        Usage(HUGE, 1, 0),
        Usage(10, HUGE, 0),
        Usage(TOKENS_MAX + 1, 1, 0),
        Usage(TOKENS_MAX, 1, 0),
        Usage(-5, 1, 0),
        Usage(0, 1, 0),
        Usage(5, -1, 0),
        Usage(5, 1, 6),
        Usage(5, 1, -1),
    ],
)
def test_counts_that_no_sequence_can_have_are_refused_and_counted(usage: Usage) -> None:
    state = fleet()
    turn(state, 400, usage)
    assert state.account.usages_refused == 1
    again = turn(state, 400, None)
    assert (again.prompt_tokens, again.decision.cached_tokens) == (100, 0)


def test_a_models_own_length_is_the_limit_where_its_worker_states_it() -> None:
    state = fleet(sequence_tokens=32_768)
    turn(state, 400_000, Usage(32_768, 1, 0))
    turn(state, 400_000, Usage(32_000, 768, 0))
    assert state.account.usages_refused == 1


NUMBERS = (
    st.integers() | st.integers(min_value=0, max_value=HUGE) | st.floats() | st.booleans()
    | st.none() | st.text(LETTERS, max_size=5) | st.lists(st.integers(), max_size=2)
)  # fmt: skip
KEYS = st.sampled_from([
    "prompt_tokens", "input_tokens", "completion_tokens", "output_tokens",
    "cache_read_input_tokens", "cache_creation_input_tokens", "total_tokens",
])  # fmt: skip


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(pairs=st.lists(st.tuples(KEYS, NUMBERS), max_size=9), details=NUMBERS,
       sizes=st.lists(st.integers(0, 1 << 25), min_size=1, max_size=3),
       prompt=st.sampled_from(Prompt), limit=st.sampled_from([0, 4096]))  # fmt: skip
def test_no_answer_breaks_the_books(
    pairs: list[tuple[str, object]], details: object, sizes: list[int], prompt: Prompt, limit: int
) -> None:
    """Doubled keys, digits without end, negative and broken numbers: the next turn is decided."""
    members = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs]
    members.append(f'"prompt_tokens_details": {{"cached_tokens": {json.dumps(details)}}}')
    usage = scan_usage(b'{"usage":{' + ", ".join(members).encode() + b"}}")
    state = fleet(limit)
    for size in sizes:
        turn(state, size, usage, prompt)
        session = state.sessions.get(S)
        assert session is not None
        assert BYTES_PER_TOKEN_MIN <= session.bytes_per_token <= BYTES_PER_TOKEN_MAX
        assert 0 <= session.known_tokens <= (limit or TOKENS_MAX)
    kept = believed(usage, limit)
    assert kept is usage or state.account.usages_refused == len(sizes)


@pytest.mark.parametrize(
    "tail",
    [
        b'{"usage":' + b"[" * 1000,
        b'{"usage":' + b'{"a":' * 200,
        b'{"usage":{"prompt_tokens":' + b"9" * 5000 + b"}}",
        b'{"usage":{"prompt_tokens":1e999,"completion_tokens":NaN}}',
        b'{"usage":{"prompt_tokens":-9,"completion_tokens":-Infinity}}',
        b'{"usage":12}',
        b'{"usage":\xff\xfe',
    ],
)
def test_what_is_no_usage_says_nothing(tail: bytes) -> None:
    assert scan_usage(tail) is None


IMAGE = {"type": "input_image", "file_id": "file_1"}
ELSEWHERE = [
    ("/v1/responses", {"input": "hi " * 2000, "previous_response_id": "resp_0"}),
    ("/v1/responses", {"input": "hi " * 2000, "conversation": "conv_1"}),
    ("/v1/responses", {"input": "hi " * 2000, "conversation": {"id": "conv_1"}}),
    ("/v1/responses", {"input": [{"content": [IMAGE]}], "instructions": "hi " * 2000}),
    ("/v1/responses", {"input": [{"content": [{"type": "input_file", "file_id": "f"}]}]}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("/v1/responses", {"prompt": {"id": "pmpt_1", "version": "2"}}),
    ("/v1/chat/completions", {"messages": [{"content": [{"type": "image_url", "image_url": {}}]}]}),
    ("/v1/messages", {"messages": [{"content": [{"type": "image", "source": {"type": "url"}}]}]}),
    ("/v1/completions", {"prompt": "hi " * 2000, "prompt_embeds": "abcd"}),
    ("/v1/audio/speech", {"model": "m", "voice": "v" * 4000}),
]
IN_BODY = [
    ("/v1/chat/completions", {"messages": [{"content": 'an "type": "image" and "image_url"'}]}),
    ("/v1/responses", {"previous_response_id": None, "conversation": None, "input": "hi"}),
    ("/v1/completions", {"prompt": ["hi", "you"]}),
    ("/v1/completions", {"prompt": list(range(2000))}),
    ("/v1/messages", {"system": "you", "messages": [], "prompt": None, "prompt_embeds": None}),
]


@pytest.mark.parametrize(
    ("body", "place"),
    [(body, Prompt.ELSEWHERE) for _, body in ELSEWHERE]
    + [(body, Prompt.IN_BODY) for _, body in IN_BODY],
)
def test_where_the_prompt_of_a_body_is(body: dict[str, object], place: Prompt) -> None:
    assert place_of_prompt(scan(json.dumps(body).encode())) is place


@pytest.mark.parametrize(("path", "body"), ELSEWHERE)
@pytest.mark.parametrize("bytes_per_token", [1.5, 3.8, 4.0])
def test_the_gateway_learns_from_no_body_that_has_not_its_prompt(
    play: Play, path: str, body: dict[str, object], bytes_per_token: float
) -> None:
    """Also not when the count is near what was expected: 4 bytes a token, unless told otherwise."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        text = json.dumps(body).encode()
        engine.usage = b'{"prompt_tokens": %d, "completion_tokens": 1}' % (
            len(text) / bytes_per_token
        )
        await client.post(path, text, x__session__id="a")
        ((_, session),) = world.gateway.state.sessions.items()
        assert session.bytes_per_token == 4.0
        text = json.dumps({"input": "hi " * 3000}).encode()
        engine.usage = b'{"prompt_tokens": 3000, "completion_tokens": 1}'
        await client.post("/v1/responses", text, x__session__id="a")
        assert session.bytes_per_token == len(text) / 3000

    play(scenario, engines=1)


def test_a_body_that_says_nothing_teaches_nothing(play: Play) -> None:
    """A header names the session, so what is no JSON passes; nobody has read it."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        engine.usage = b'{"prompt_tokens": 1000, "completion_tokens": 1}'
        for text in (b"--form\r\n" * 400, b'{"messages": [' + b"1," * 2000):
            await client.post("/v1/audio/transcriptions", text, x__session__id="a")
        ((_, session),) = world.gateway.state.sessions.items()
        assert (session.bytes_per_token, session.known_tokens) == (4.0, 1001)

    play(scenario, engines=1)


def test_a_usage_of_400_digits_costs_the_gateway_nothing(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        engine.usage = b'{"prompt_tokens": %b, "completion_tokens": 1}' % (b"9" * 400)
        for _ in range(3):
            answer = await client.post("/v1/chat/completions", x__session__id="a")
            assert answer.status == 200
        gateway = world.gateway
        gateway.state.check()
        assert (gateway.state.account.finished, gateway.state.account.usages_refused) == (3, 3)
        assert gateway.turns.observer.prompt_tokens == 0

    play(scenario, engines=1)


def test_usage_is_read_that_the_prompts_token_ids_follow(play: Play) -> None:
    """vLLM's order where a chat asks for token ids, and ours: the context was learnt as nothing."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        ids = b", ".join(b"%d" % number for number in range(1300))
        usage = b'{"prompt_tokens": 1300, "completion_tokens": 4}, "prompt_token_ids": [%b]'
        engine.usage = usage % ids
        await client.post("/v1/chat/completions", x__session__id="a")
        await world.settled()
        assert world.gateway.turns.observer.prompt_tokens == 1300
        ((_, session),) = world.gateway.state.sessions.items()
        assert session.known_tokens == 1304

    play(scenario, engines=1)


@settings(max_examples=examples(100))
@given(
    st.lists(st.integers(1, 9_000), max_size=40),
    st.lists(st.integers(0, 9_000), min_size=1, max_size=3),
)
def test_usage_is_the_same_however_the_answer_is_cut(cuts: list[int], gaps: list[int]) -> None:
    body = b"{"
    for number, gap in enumerate(gaps):
        counts = {"prompt_tokens": number + 1, "completion_tokens": 2, "seen": "x" * (gap % 700)}
        body += b'"usage": %b, "x": "%b",' % (json.dumps(counts).encode(), b"y" * gap)
    payload, at = AnswerPayload(), 0
    for length in [*cuts, len(body)]:
        payload.take(body[at : at + length])
        at += length
        assert len(payload.tail) < 2 * TAIL_BYTES
    assert (
        scan_usage(payload.tail) == scan_usage(body) == Usage(len(gaps), 2, 0, tells_cached=False)
    )


@given(
    st.tuples(*[st.integers(0, 10**11)] * 4),
    st.sampled_from([(",", ":"), (", ", ": ")]),
    st.permutations(["total_tokens", "completion_tokens"]),
)
def test_usage_as_most_engines_write_it_is_read_as_any_other(
    counts: tuple[int, int, int, int], marks: tuple[str, str], names: list[str]
) -> None:
    prompt, first, second, cached = counts
    said = {"prompt_tokens": prompt, **dict(zip(names, (first, second), strict=True))}
    plain = said | {"prompt_tokens_details": {"cached_tokens": cached}}
    other = {"seen": 1} | plain  # no engine's form: read by the JSON decoder
    tails = [json.dumps({"usage": one}, separators=marks).encode() for one in (plain, other)]
    assert scan_usage(tails[0]) == scan_usage(tails[1])
