"""Who is asking: the fields of research on agents, exactly, and scoped to their tenant."""

from __future__ import annotations

import json

import pytest

from ownerserve.kv.wire.headers import NAME_DIGITS
from ownerserve.router.requests.body import NO_FIELDS, scan
from ownerserve.router.requests.identity import (
    Scope,
    SessionSource,
    identify,
    response_alias,
    tenant_of,
)

SCOPE = Scope("t", "m")


def of_headers(**headers: str) -> str | None:
    given = {name.replace("__", "-").encode(): value.encode() for name, value in headers.items()}
    return identify(given, NO_FIELDS, scope=SCOPE).session


def of_body(**fields: object) -> str | None:
    return identify({}, scan(json.dumps(fields).encode()), scope=SCOPE).session


@pytest.mark.parametrize(
    "name",
    [
        "x-session-id",
        "x-dynamo-session-id",
        "x-smg-routing-key",
        "x-claude-code-session-id",
        "thread-id",
        "session-id",
        "session_id",
        "conversation_id",
        "x-opencode-session",
        "x-session-affinity",
    ],
)
def test_every_header_alone_names_a_session(name: str) -> None:
    identity = identify({name.encode(): b"abc"}, NO_FIELDS, scope=SCOPE)
    assert identity.session == SCOPE.name(name, "abc")
    assert identity.source is SessionSource.HEADER


def test_an_explicit_header_wins_over_the_agents_own_and_any_header_over_the_body() -> None:
    headers = {b"x-claude-code-session-id": b"cc", b"x-session-id": b"mine"}
    body = scan(b'{"prompt_cache_key": "body"}')
    assert identify(headers, body, scope=SCOPE).session == SCOPE.name("x-session-id", "mine")


def test_ids_are_compared_whole() -> None:
    assert of_headers(x__session__id="session-1") != of_headers(x__session__id="session-12")


def test_tenants_and_fields_do_not_share_sessions() -> None:
    tenants = [Scope(tenant_of(key)) for key in (b"Bearer 1", b"Bearer 2")]
    one, two = (identify({b"x-session-id": b"a"}, NO_FIELDS, scope=t).session for t in tenants)
    assert one != two
    assert of_body(user="a") != of_body(prompt_cache_key="a")


def test_a_claude_code_subagent_has_a_session_of_its_own_under_its_parent() -> None:
    base = {b"x-claude-code-session-id": b"cc"}
    root = identify(base, NO_FIELDS, scope=SCOPE)
    child = identify(base | {b"x-claude-code-agent-id": b"a1"}, NO_FIELDS, scope=SCOPE)
    nested = identify(
        base | {b"x-claude-code-agent-id": b"a2", b"x-claude-code-parent-agent-id": b"a1"},
        NO_FIELDS,
        scope=SCOPE,
    )
    assert root.parent is None
    assert child.session != root.session
    assert child.parent == root.session
    assert nested.parent == child.session


def test_codex_and_dynamo_name_parents_and_ends() -> None:
    codex = {b"thread-id": b"t2", b"session-id": b"s", b"x-codex-parent-thread-id": b"t1"}
    assert identify(codex, NO_FIELDS, scope=SCOPE).parent == SCOPE.name("thread-id", "t1")
    dynamo = {b"x-dynamo-session-id": b"d", b"x-dynamo-session-final": b"True"}
    assert identify(dynamo, NO_FIELDS, scope=SCOPE).final


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"session_id": "s", "prompt_cache_key": "k"}, ("session_id", "s")),
        ({"prompt_cache_key": "k", "user": "u"}, ("prompt_cache_key", "k")),
        ({"previous_response_id": "resp_1", "user": "u"}, ("previous_response_id", "resp_1")),
        ({"metadata": {"user_id": "user_1_account__session_9f-2"}}, ("metadata", "9f-2")),
        ({"metadata": {"user_id": '{"session_id": "9f"}'}}, ("metadata", "9f")),
        ({"metadata": {"session": 1}, "user": "u"}, ("user", "u")),
        ({"user": "caf\u00e9"}, ("user", "caf\u00e9")),
        ({"user": ""}, None),
        ({"user": 7, "prompt_cache_key": None}, None),
    ],
)
def test_body_fields_in_their_order(
    fields: dict[str, object], named: tuple[str, str] | None
) -> None:
    assert of_body(**fields) == (named and SCOPE.name(*named))


def test_a_name_has_one_length_and_stays_exact() -> None:
    long = "x" * 10_000
    assert len(of_body(user=long) or "") == len(of_body(user="x") or "") == NAME_DIGITS
    assert of_body(user=long) == of_body(user=long)
    assert of_body(user=long) != of_body(user=long + "y")
    assert SCOPE.name("a", "b", "c") != SCOPE.name("a", "b/c") != SCOPE.name("a/b", "c")
    assert Scope("t", "m").name("f", "v") != Scope("t", "n").name("f", "v")


def test_an_answers_alias_is_what_the_next_turn_will_ask_for() -> None:
    assert response_alias(SCOPE, "resp_7") == of_body(previous_response_id="resp_7")
