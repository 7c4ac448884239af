"""This module parses OpenAI request bodies into `EngineRequest`s or refuses them; it never sends
anything.

A field is understood, harmless here and ignored (IGNORED), accepted at the one value that changes
nothing (NEUTRAL), or refused by name. Nothing that would change the answer is dropped silently.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from ownerserve.engines.hf.model.text import ChatCodec
from ownerserve.engines.hf.scheduling.requests import EngineRequest, Facts, Sampling, Stopping
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch
from ownerserve.kv.prefix import SALTED_VOCABULARY
from ownerserve.kv.wire.headers import (
    ENGINE_SESSION_HEADER,
    RESERVATION_HEADER,
    LenderAddress,
    TurnLine,
)
from ownerserve.kv.wire.rpc import NO_NONCE, Nonce

MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_SALT = 128
"""Characters, as vLLM takes."""
MAX_SESSION_ID = 256
"""The number of a `Reserved` answer of the node's RPC port: ties a request to its place. A gateway
says it in its own line (kv.wire.headers)."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of /v1/completions."""
DEFAULT_CHAT_TOKENS = 1024
"""The default of /v1/chat/completions, context permitting: a tiny random model never ends."""
GREEDY_BELOW = 1e-5
"""Temperatures under this overflow a softmax; they mean greedy."""

IGNORED = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier"}
    | {"store", "user"}
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "length_penalty": (1,),
    "min_p": (0,),
    "modalities": (["text"],),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "use_beam_search": (False,),
}

Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Logprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct):
    """`StreamOptions` are OpenAI's `stream_options`."""

    include_usage: bool = False


class Body(msgspec.Struct, kw_only=True):
    """A `Body` is what both endpoints take; null means the default. Fields beyond OpenAI's are
    vLLM's."""

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Natural | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    seed: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=16)] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SESSION_ID)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SALT)] | None = None


class ChatBody(Body, kw_only=True):
    """A `ChatBody` is the body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None


class CompletionBody(Body, kw_only=True):
    """A `CompletionBody` is the body of /v1/completions."""

    prompt: str | list[Token]
    logprobs: Logprobs | None = None


B = TypeVar("B", bound=Body)


class TurnHeaders(msgspec.Struct, frozen=True):
    """`TurnHeaders` are what a turn's headers say beside its body. `is_final`: its session ends
    with it; `is_judged`: it is an append that nobody asked about; `is_named`: a gateway named the
    session, which can be owned then; `parent` is the session that it was forked from, `group` names
    sessions that share a head, `epoch` is the highest that is known of its owner, `version` how
    many turns its owners are known to have finished, `bring_from` who lends what it holds
    of the prompt, `decode_from` who is to compute it; `leg` numbers the two of a turn that goes to
    both at once, and `is_prefill` is the one that computes its prompt alone."""

    session_id: str | None = None
    is_final: bool = False
    reservation: int | None = None
    is_judged: bool = False
    is_named: bool = False
    parent: SessionId | None = None
    group: str = ""
    epoch: Epoch | None = None
    version: int = 0
    bring_from: LenderAddress | None = None
    decode_from: LenderAddress | None = None
    leg: Nonce = NO_NONCE
    is_prefill: bool = False


def parse_body(data: bytes, body_type: type[B]) -> B:
    """Decode a request's body. Raises InvalidInput naming the field at fault."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        _refuse_unknown(fields, body_type)
        return msgspec.json.decode(data, type=body_type)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at ")
        name = re.search(r"\$\.?(\w+)", where)
        missing = re.search(r"missing required field `(\w+)`", problem)
        field = missing[1] if missing else name[1] if name else "body"
        raise InvalidInput(field, problem, "see OpenAI's API reference for its form") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput("body", str(error), "send one JSON object") from error


def _refuse_unknown(fields: Mapping[str, msgspec.Raw], body_type: type[Body]) -> None:
    known = body_type.__struct_fields__
    for name, raw in fields.items():
        if name in known or name in IGNORED:
            continue
        value = msgspec.json.decode(raw)
        if value is None or value in NEUTRAL.get(name, ()):
            continue
        if name in NEUTRAL:
            raise InvalidInput(name, f"{value!r} is not supported", "leave it out")
        near = difflib.get_close_matches(name, known, n=1)
        mend = f"did you mean {near[0]!r}?" if near else "leave it out"
        raise InvalidInput(name, "is not a supported field", mend)


def chat_prompt(body: ChatBody, codec: ChatCodec) -> list[int]:
    """Return the tokens of the messages, through the model's template."""
    for i, message in enumerate(body.messages):
        if not isinstance(message.get("role"), str):
            raise InvalidInput(f"messages[{i}].role", "is missing", "say who speaks")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or any(
            not isinstance(part, dict) or part.get("type") != "text" for part in parts
        ):
            raise InvalidInput(
                f"messages[{i}].content", "holds something else than text", "send text parts only"
            )
    return codec.chat(body.messages, body.tools or ())


def completion_prompt(body: CompletionBody, codec: ChatCodec) -> list[int]:
    """Return the text's tokens, or the tokens as sent."""
    return codec.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt


def make_request(
    body: ChatBody | CompletionBody,
    prompt: list[int],
    *,
    facts: Facts,
    request_id: str,
    turn: TurnHeaders,
    fresh_seed: int,
) -> EngineRequest:
    """Check a parsed body against the model and make the engine's request; `fresh_seed` serves a
    body without a seed. Raises InvalidInput."""
    _check_model(body.model, facts)
    if not prompt:
        raise InvalidInput("prompt", "has no tokens", "send at least one")
    if max(prompt) >= facts.vocab_size:
        raise InvalidInput(
            "prompt", f"token {max(prompt)} is unknown", f"use tokens below {facts.vocab_size}"
        )
    seed = fresh_seed if body.seed is None else body.seed
    return EngineRequest(
        request_id=request_id,
        prompt=prompt,
        stopping=_stopping(body, len(prompt), facts),
        sampling=_sampling(body, seed, facts),
        choices=body.n or 1,
        session_id=turn.session_id,
        is_final=turn.is_final,
        is_named=turn.is_named,
        parent=turn.parent,
        group=turn.group,
        epoch=turn.epoch,
        version=turn.version,
        reservation=turn.reservation,
        is_judged=turn.is_judged,
        bring_from=turn.bring_from,
        decode_from=turn.decode_from,
        leg=turn.leg,
        is_prefill=turn.is_prefill,
        cache_salt=_salt(body, facts),
    )


def _salt(body: Body, facts: Facts) -> str:
    """Return what parts the prompt's state from others'; empty: nothing does. Raises InvalidInput
    where this engine could not keep it apart."""
    if body.cache_salt is not None and facts.vocab_size > SALTED_VOCABULARY:
        problem = f"can't be kept for {facts.vocab_size} tokens of vocabulary"
        raise InvalidInput("cache_salt", problem, f"use a model of up to {SALTED_VOCABULARY}")
    return body.cache_salt or ""


def told_of(headers: Mapping[str, str], body: Body, line: TurnLine | None) -> TurnHeaders:
    """Return what the headers say of a turn. With a gateway's `line` the session is the gateway's,
    and a client's own word for it names nothing; without one it is the client's. Raises
    InvalidInput."""
    reservation = _reservation(headers.get(RESERVATION_HEADER))
    if line is not None:
        place = reservation if line.reservation is None else line.reservation
        return TurnHeaders(
            line.name,
            line.final,
            place,
            line.judged,
            is_named=line.name is not None,
            parent=line.parent,
            group=line.group or "",
            epoch=line.epoch,
            version=line.version or 0,
            bring_from=line.bring_from,
            decode_from=line.decode_from,
            leg=Nonce(line.nonce or NO_NONCE),
            is_prefill=line.prefill,
        )
    session_id = headers.get(ENGINE_SESSION_HEADER)
    if session_id and len(session_id) > MAX_SESSION_ID:
        raise InvalidInput(
            "x-session-id", "is too long", f"use at most {MAX_SESSION_ID} characters"
        )
    if session_id and body.session_id and session_id != body.session_id:
        raise InvalidInput("session_id", "differs from x-session-id", "send one of them")
    return TurnHeaders(body.session_id or session_id, reservation=reservation)


def _reservation(number: str | None) -> int | None:
    if number is None:
        return None
    if not (number.isascii() and number.isdigit() and len(number) < 20):
        raise InvalidInput(
            RESERVATION_HEADER, f"{number!r} is no number", "send the one of the Reserved answer"
        )
    return int(number)


def _check_model(model: str | None, facts: Facts) -> None:
    if model is not None and model != facts.model:
        raise ModelNotFound(model, facts.model)


class ModelNotFound(InvalidInput):
    """The caller has asked for a model that is not here (404 in OpenAI's API)."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__("model", f"{asked!r} is not served here", f"use {served!r}")


def _stopping(body: ChatBody | CompletionBody, prompt_tokens: int, facts: Facts) -> Stopping:
    # The last sampled token is never computed: it needs no place.
    room = facts.sequence_tokens + 1 - prompt_tokens
    asked = body.max_tokens
    if isinstance(body, ChatBody):
        asked = asked or body.max_completion_tokens
        default = DEFAULT_CHAT_TOKENS
    else:
        default = DEFAULT_COMPLETION_TOKENS
    max_tokens = asked or max(1, min(default, room))
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidInput("min_tokens", f"{min_tokens} > max_tokens {max_tokens}", "lower it")
    strings = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    for token in body.stop_token_ids or ():
        _check_token("stop_token_ids", token, facts)
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        strings=strings,
        token_ids=frozenset(body.stop_token_ids or ()),
        eos_token_ids=frozenset() if body.ignore_eos else facts.eos_token_ids,
    )


def _sampling(body: ChatBody | CompletionBody, seed: int, facts: Facts) -> Sampling:
    temperature = 1.0 if body.temperature is None else body.temperature
    bias = {}
    for name, value in (body.logit_bias or {}).items():
        if not name.isdecimal():
            raise InvalidInput("logit_bias", f"{name!r} is no token id", "use numbers as keys")
        bias[int(name)] = value
        _check_token("logit_bias", int(name), facts)
    return Sampling(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=body.top_p or 1.0,
        top_k=max(body.top_k or 0, 0),
        seed=seed,
        logprobs=_logprobs(body),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
    )


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidInput("top_logprobs", "is set without logprobs", "set logprobs to true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _check_token(field: str, token: int, facts: Facts) -> None:
    if token >= facts.vocab_size:
        raise InvalidInput(field, f"token {token} is unknown", f"use one below {facts.vocab_size}")
