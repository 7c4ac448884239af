"""Agents that send no key: told apart, and found again, by the bytes that they repeat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.router.requests.body import scan
from ownerserve.router.requests.identity import (
    TIPS_KEPT,
    ChainPlace,
    Content,
    ContentChain,
    Scope,
    content_of,
)
from tests.support.examples import examples

SCOPE = Scope("t")
Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "You are an agent. " * 400}


def said(text: str, *, times: int = 100) -> Message:
    return {"role": "user", "content": f"{text} " * times}


def content(messages: list[Message], *, tenant: str = "t", **fields: Any) -> Content:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    found = content_of(scan(body), tenant=tenant)
    assert found is not None
    return found


def equal_until(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


class Agents:
    """A chain, asked in the way the gateway does: a turn ends before the session's next."""

    def __init__(self) -> None:
        self.chain = ContentChain()

    def turn(self, messages: list[Message], **fields: Any) -> ChainPlace:
        place = self.begin(messages, **fields)
        self.chain.ended(place.session)
        return place

    def begin(self, messages: list[Message], **fields: Any) -> ChainPlace:
        place = self.chain.arrive(content(messages, **fields), scope=SCOPE)
        assert place is not None
        self.chain.check()
        return place


def test_a_conversation_that_grows_is_one_session() -> None:
    agents, messages = Agents(), [SYSTEM, said("fix the bug")]
    first = agents.turn(messages)
    for number in range(10):
        messages += [{"role": "assistant", "content": f"call {number}"}, said(f"result {number}")]
        assert agents.turn(messages) == ChainPlace(first.session)


def test_agents_that_share_a_system_prompt_are_told_apart_and_know_what_they_share() -> None:
    """sgl-project/sglang#34513: keyless agents collapsed on one worker."""
    agents = Agents()
    one = agents.turn([SYSTEM, said("fix the bug")])
    two = agents.turn([SYSTEM, said("write a test")])
    assert one.session != two.session
    assert two.parent == one.session
    shared = len(json.dumps(SYSTEM))
    assert shared * 2 / 3 - 1024 < two.shared_bytes <= shared + 20
    again = agents.turn([SYSTEM, said("write a test"), said("more")])
    assert again == ChainPlace(two.session)


def test_turns_of_one_sentence_are_not_confused_where_chunks_are_equal() -> None:
    """Both bodies end in the same chunk: only the bytes past it tell them apart."""
    agents = Agents()
    one = agents.turn([SYSTEM, said("a", times=3)])
    two = agents.turn([SYSTEM, said("b", times=3)])
    assert one.session != two.session
    assert agents.turn([SYSTEM, said("a", times=3), said("x")]).session == one.session
    assert agents.turn([SYSTEM, said("b", times=3), said("x")]).session == two.session


def test_who_goes_back_forks() -> None:
    agents = Agents()
    trunk = [SYSTEM, said("plan")]
    first = agents.turn(trunk)
    main = agents.turn([*trunk, said("way one")])
    other = agents.turn([*trunk, said("way two")])
    assert main.session == first.session
    assert other.session != first.session
    assert other.parent == first.session
    assert abs(other.shared_bytes - len(json.dumps(trunk))) < 40
    assert agents.turn([*trunk, said("way two"), said("on")]) == ChainPlace(other.session)


def test_the_same_body_again_is_a_retry_or_another_sample() -> None:
    agents, body = Agents(), [SYSTEM, said("sample me")]
    first = agents.begin(body)
    sample = agents.begin(body)
    assert sample.session != first.session
    assert sample.parent == first.session
    agents.chain.ended(sample.session)
    assert agents.begin(body) == ChainPlace(sample.session)  # nobody waits for it: it is sent again


def test_tenants_models_and_tools_do_not_share_sessions() -> None:
    agents, body = Agents(), [SYSTEM, said("hello")]
    first = agents.turn(body)
    assert agents.turn(body, tenant="other").parent is None
    assert agents.turn(body, tools=[{"name": "read"}]).session != first.session
    assert agents.turn(body, model="n").session != first.session


def test_big_tools_alone_are_worth_sharing() -> None:
    agents, tools = Agents(), [{"name": "read", "description": "x" * 5000}]
    first = agents.turn([said("one")], tools=tools)
    second = agents.turn([said("two")], tools=tools)
    assert second.parent == first.session
    assert second.shared_bytes >= 5000


def test_one_text_that_grows_is_a_session_too() -> None:
    """/v1/completions, and scaffolds that append to one long message."""
    agents, text = ContentChain(), "Observation: ... " * 200

    def ask(prompt: str) -> ChainPlace | None:
        found = content_of(scan(json.dumps({"prompt": prompt}).encode()), tenant="t")
        assert found is not None
        return agents.arrive(found, scope=SCOPE)

    first, second = ask(text), ask(text + "Thought: so be it.")
    assert first is not None
    assert second == ChainPlace(first.session)


def test_anthropics_cache_markers_move_without_breaking_the_session() -> None:
    marker = {"cache_control": {"type": "ephemeral"}}
    agents = Agents()
    part = {"type": "text", "text": "x" * 1500}
    first = agents.turn([{"role": "user", "content": [part | marker]}])
    later = [{"role": "user", "content": [part]}, {"role": "user", "content": [part | marker]}]
    assert agents.turn(later) == ChainPlace(first.session)


def test_small_talk_is_no_session() -> None:
    assert ContentChain().arrive(content([said("hi", times=1)]), scope=SCOPE) is None


def test_a_named_session_tells_what_it_begins_like() -> None:
    chain = ContentChain()
    one = chain.first_turn("t/x/1", content([SYSTEM, said("a")]), scope=SCOPE)
    two = chain.first_turn("t/x/2", content([SYSTEM, said("b")]), scope=SCOPE)
    assert one == ChainPlace("t/x/1")
    assert two.parent == "t/x/1"
    assert two.shared_bytes > 4000


def test_sessions_that_begin_alike_are_a_group_under_one_name() -> None:
    agents = Agents()
    task = [SYSTEM, said("fix the bug in the parser", times=400)]
    first = agents.turn([SYSTEM, said("read")]).session
    assert agents.chain.group(first) is None  # nobody else began like it so far
    second = agents.turn([*task, said("a")]).session
    group = agents.chain.group(second)
    assert group is not None
    assert agents.chain.group(first) == group
    third = agents.turn([*task, said("b")]).session  # it shares more with the second one
    fork = agents.turn([*task, said("a"), said("go on")]).session  # its next turn
    assert fork == second
    assert agents.chain.group(third) == agents.chain.group(second) == group
    chain = ContentChain()  # another gateway, which meets other sessions in another order
    chain.first_turn("t/x/9", content([SYSTEM, said("write")]), scope=SCOPE)
    chain.first_turn("t/x/8", content([SYSTEM, said("plan")]), scope=SCOPE)
    assert chain.group("t/x/8") == chain.group("t/x/9") == group


def test_a_group_is_of_one_tenant_and_goes_with_its_sessions() -> None:
    chain, names = ContentChain(), {}
    for tenant in ("t", "u"):
        for number in range(2):
            name = f"{tenant}/{number}"
            part = content([SYSTEM, said(f"task {number}")], tenant=tenant)
            chain.first_turn(name, part, scope=Scope(tenant))
        names[tenant] = chain.group(f"{tenant}/0")
        assert names[tenant] == chain.group(f"{tenant}/1")
    assert names["t"] != names["u"]
    assert None not in names.values()
    chain.forget("t/0")
    assert chain.group("t/0") is None


def test_tools_and_a_system_field_are_a_head_of_their_own() -> None:
    chain, head = ContentChain(), "You are an agent. " * 400
    for number in range(3):
        part = content([said(f"{number}", times=900)], system=head, tools=[{"name": "ls"}])
        chain.first_turn(f"t/{number}", part, scope=SCOPE)
    assert chain.group("t/0") == chain.group("t/1") == chain.group("t/2") is not None
    other = content([said("0", times=900)], system=head, tools=[{"name": "cat"}])
    chain.first_turn("t/other", other, scope=SCOPE)
    assert chain.group("t/other") is None


def test_memory_is_bounded_and_the_forgotten_leave_nothing() -> None:
    chain, names = ContentChain(limit=8), []
    for number in range(50):
        place = chain.arrive(content([SYSTEM, said(f"task {number}")]), scope=SCOPE)
        assert place is not None
        names.append(place.session)
        for turn in range(TIPS_KEPT + 2):
            body = content([SYSTEM, said(f"task {number}"), said(f"{turn}")])
            went_on = chain.arrive(body, scope=SCOPE)
            assert went_on is not None
            names.append(went_on.session)
        chain.check()
    assert len(chain) == 8
    for name in names:
        chain.forget(name)
    chain.check()
    assert len(chain) == 0
    left = (chain._tips, chain._marks)  # noqa: SLF001 - its memory is what is tested
    assert left == ({}, {})


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 99)), max_size=15))
def test_going_on_joins_and_going_back_forks(steps: list[tuple[int, int, int]]) -> None:
    """Against a model that keeps whole bodies. `back` 0 goes on from a session's last one."""
    agents = Agents()
    bodies: dict[str, list[list[Message]]] = {}
    for number, (which, back, times) in enumerate(steps):
        names = sorted(bodies)
        name = names[which % len(names)] if names else None
        history = bodies[name] if name is not None else [[SYSTEM]]
        back = min(back, len(history) - 1, TIPS_KEPT - 1)
        base = history[-1 - back]
        body = [*base, said(f"step {number}", times=times)]
        place = agents.turn(body)
        if name is not None and back == 0:
            assert place == ChainPlace(name)
        else:
            assert place.session not in bodies
        if name is not None and back > 0:
            written, parents = json.dumps(body), bodies[place.parent or ""]
            common = max(equal_until(written, json.dumps(one)) for one in parents)
            assert len(json.dumps(base)) - 2 <= place.shared_bytes < common
        bodies.setdefault(place.session, []).append(body)


def test_what_is_no_conversation_has_no_content() -> None:
    for body in (b"{}", b'{"messages": 7}', b'{"prompt": null}'):
        assert content_of(scan(body), tenant="t") is None
    with pytest.raises(KeyError):
        scan(b"{}").slice("tools")
