"""OpenAI's and Anthropic's own clients against a gateway over two engines that speak both dialects,
all of them processes: answers, streams, and errors as the clients' own types."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import anthropic
import openai
import pytest

from tests.support.gateway.engine import MODEL, engine_processes
from tests.support.gateway.process import gateway_process

pytestmark = pytest.mark.slow

KEY, OTHER = "sk-of-acme-0123456789", "sk-nobody-0123456789"
TEXT = "w0 w1 w2 w3 w4 w5 w6 w7 "
SHORT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a gateway with tenants serves."""
    folder = tmp_path_factory.mktemp("clients")
    tenants = folder / "tenants.toml"
    tenants.write_text(f'secret = "{"s" * 32}"\n[tenants.acme]\nkeys = ["{KEY}"]\n')
    tenants.chmod(0o600)
    with (
        engine_processes(2) as engines,
        gateway_process(
            folder, [engine.port for engine in engines], "--tenants-file", str(tenants)
        ) as running,
    ):
        yield running.data_url


@pytest.fixture
def ours(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(api_key=KEY, base_url=url, max_retries=0) as client:
        yield client


def said(order: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": order}]


def test_openai_chat(ours: openai.OpenAI) -> None:
    whole = ours.chat.completions.create(model=MODEL, messages=SHORT)
    assert whole.choices[0].message.content == TEXT
    assert whole.usage.completion_tokens == 8
    stream = ours.chat.completions.create(
        model=MODEL, messages=SHORT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage.prompt_tokens > 0


def test_openai_completions_embeddings_and_models(ours: openai.OpenAI) -> None:
    assert ours.completions.create(model=MODEL, prompt="a").choices[0].text == TEXT
    stream = ours.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(c.choices[0].text for c in stream if c.choices) == TEXT
    told = ours.embeddings.create(model=MODEL, input="a", encoding_format="float")
    assert told.data[0].embedding == [0.5, 0.25]
    assert [one.id for one in ours.models.list()] == [MODEL]
    assert ours.models.retrieve(MODEL).id == MODEL


def test_openai_responses(ours: openai.OpenAI) -> None:
    assert ours.responses.create(model=MODEL, input="a").output_text == TEXT
    with ours.responses.stream(model=MODEL, input="a") as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == TEXT
    first = ours.responses.create(model=MODEL, input="a" * 2000)
    again = ours.responses.create(model=MODEL, input="b", previous_response_id=first.id)
    assert again.output_text == TEXT


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model=MODEL, max_tokens=8, messages=SHORT)
    assert (whole.content[0].text, whole.stop_reason) == (TEXT, "end_turn")
    with claude.messages.stream(model=MODEL, max_tokens=8, messages=SHORT) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().usage.output_tokens == 8
    counted = claude.messages.count_tokens(model=MODEL, messages=SHORT)
    assert counted.input_tokens > 0


def test_a_full_fleet_is_waited_for_as_it_asks(url: str) -> None:
    """All workers say 429 with Retry-After: 1: the clients wait that long by themselves."""
    with openai.OpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=1) as client:
        began = time.monotonic()
        told = client.chat.completions.create(model=MODEL, messages=said("<refuse 429 1> a"))
        assert told.choices[0].message.content == TEXT
        assert time.monotonic() - began >= 1.0
    with anthropic.Anthropic(api_key=KEY, base_url=url, max_retries=1) as client:
        began = time.monotonic()
        whole = client.messages.create(model=MODEL, max_tokens=8, messages=said("<refuse 529 1> b"))
        assert whole.content[0].text == TEXT
        assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize(
    ("status", "of_openai", "of_anthropic", "kind"),
    [
        (429, openai.RateLimitError, anthropic.OverloadedError, "overloaded_error"),
        (503, openai.InternalServerError, anthropic.ServiceUnavailableError, "overloaded_error"),
    ],
)
def test_a_fleet_that_stays_full_is_the_clients_own_error(
    ours: openai.OpenAI,
    claude: anthropic.Anthropic,
    *,
    status: int,
    of_openai: type[openai.APIStatusError],
    of_anthropic: type[anthropic.APIStatusError],
    kind: str,
) -> None:
    order = said(f"<refuse {status} 99>")
    with pytest.raises(of_openai) as met:
        ours.chat.completions.create(model=MODEL, messages=order)
    assert met.value.response.headers["retry-after"] == "1"
    with pytest.raises(of_anthropic) as hit:
        claude.messages.create(model=MODEL, max_tokens=8, messages=order)
    assert hit.value.response.headers["retry-after"] == "1"
    assert hit.value.type == kind and hit.value.api_message


def test_what_is_wrong_with_a_request_is_the_clients_own_error(
    url: str, ours: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    """Each by its status, and in the form from which the client reads kind and message."""
    with pytest.raises(openai.AuthenticationError) as met:
        openai.OpenAI(api_key=OTHER, base_url=f"{url}/v1").models.list()
    assert met.value.code == "invalid_api_key"
    with pytest.raises(anthropic.AuthenticationError) as hit:
        anthropic.Anthropic(api_key=OTHER, base_url=url).messages.create(
            model=MODEL, max_tokens=8, messages=SHORT
        )
    assert hit.value.type == "authentication_error"
    twice = {"extra_body": {"kv_transfer_params": {}}}
    with pytest.raises(openai.BadRequestError) as met_bad:
        ours.chat.completions.create(model=MODEL, messages=SHORT, **twice)
    assert met_bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError) as hit_bad:
        claude.messages.create(model=MODEL, max_tokens=8, messages=SHORT, **twice)
    assert hit_bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        ours.files.list()
    with pytest.raises(anthropic.NotFoundError) as nowhere:
        claude.post("/v1/messages/nothing", cast_to=object, body={})
    assert nowhere.value.type == "not_found_error"
    big = "x" * (33 << 20)
    with pytest.raises(anthropic.ContentTooLargeError) as large:
        claude.messages.create(model=MODEL, max_tokens=8, messages=said(big))
    assert large.value.type == "request_too_large"


def test_a_stream_whose_worker_dies_is_the_clients_own_error(
    ours: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    """Never a short answer that looks whole."""
    order = said("<drop 3>")
    with pytest.raises(openai.APIError) as met:
        list(ours.chat.completions.create(model=MODEL, messages=order, stream=True))
    assert met.value.code == "worker_lost"
    with pytest.raises(openai.APIError):
        list(ours.completions.create(model=MODEL, prompt="<drop 3>", stream=True))
    with pytest.raises(openai.APIError):
        list(ours.responses.create(model=MODEL, input="<drop 3>", stream=True))
    with (
        pytest.raises(anthropic.APIError) as hit,
        claude.messages.stream(model=MODEL, max_tokens=8, messages=order) as stream,
    ):
        list(stream)
    assert "the connection to the worker was lost" in str(hit.value)


@contextmanager
def full_fleet(folder: Path, *more: str, event_ms: int) -> Iterator[str]:
    """Where a gateway serves whose one place is taken, for eight events."""
    held = ("--max-running", "1", "--wait-comments", "0.1", *more)
    with (
        engine_processes(1) as engines,
        gateway_process(folder, [engine.port for engine in engines], *held) as running,
        openai.OpenAI(api_key=KEY, base_url=f"{running.data_url}/v1", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(
            model=MODEL, messages=said(f"<slow {event_ms}>"), stream=True
        )
        next(iter(stream))
        yield running.data_url


def texts_of_streams(url: str) -> Iterator[Callable[[], str]]:
    """A stream of each API: what it comes to."""
    ours = openai.OpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0)
    claude = anthropic.Anthropic(api_key=KEY, base_url=url, max_retries=0)
    once = said("<slow 100>")

    def chat() -> str:
        chunks = ours.chat.completions.create(model=MODEL, messages=once, stream=True)
        return "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)

    def completions() -> str:
        chunks = ours.completions.create(model=MODEL, prompt="<slow 100>", stream=True)
        return "".join(one.choices[0].text for one in chunks if one.choices)

    def responses() -> str:
        with ours.responses.stream(model=MODEL, input="<slow 100>") as stream:
            return stream.get_final_response().output_text

    def messages() -> str:
        with claude.messages.stream(model=MODEL, max_tokens=8, messages=once) as stream:
            return "".join(stream.text_stream)

    yield from (chat, completions, responses, messages)


def test_a_held_stream_is_read_as_any_other(tmp_path: Path) -> None:
    """Five streams before one place: what waits hears comments, which no client takes for
    events."""
    with full_fleet(tmp_path, event_ms=200) as url, ThreadPoolExecutor() as threads:
        came = [threads.submit(text) for text in texts_of_streams(url)]
        assert [one.result(60) for one in came] == [TEXT] * 4


def test_a_held_stream_that_is_turned_away_is_the_clients_own_error(tmp_path: Path) -> None:
    briefly = ("--queue-wait", "0.5")
    with full_fleet(tmp_path, *briefly, event_ms=9000) as url, ThreadPoolExecutor() as threads:
        came = [threads.submit(text) for text in texts_of_streams(url)]
        for one in came:
            with pytest.raises((openai.APIError, anthropic.APIError)) as met:
                one.result(60)
            assert "this waited until its deadline" in str(met.value)
