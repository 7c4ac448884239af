"""Constants follow the turns that end, whatever was taken to be so before."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

import ownerserve
from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.kv.messages import Tier
from ownerserve.router.decision import DispatchReason
from ownerserve.router.learning import DERIVED_EVERY_S, LEARNT_FROM, Learning
from ownerserve.router.messages import Arrive, Dispatch, Done, WorkerUp
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.rollout.shadow import Shadow, ShadowCounts
from ownerserve.router.rollout.steering import Steering
from ownerserve.router.settings import (
    DEFAULTS,
    DERIVED,
    MOVE_MIN_MS,
    Settings,
    WorkloadFacts,
    by_hand,
    derive,
    move_ms,
)
from ownerserve.router.state import RouterState
from ownerserve.router.worker import DEFAULT_SPEED, Profile
from ownerserve.router.workload import ONE_MAX, TURNS_KEPT, EndedTurn, WorkloadWindow
from tests.support.children import ROOT
from tests.support.router.fleets import load

SMALL = WorkloadFacts(
    context_tokens_p50=500, context_tokens_p90=900, addition_tokens_p50=20, reuse_share=0.1
)
LARGE = WorkloadFacts(
    context_tokens_p50=400_000, context_tokens_p90=900_000, addition_tokens_p50=20_000,
    reuse_share=0.99,
)  # fmt: skip
WORKERS = tuple(WorkerId(name) for name in ("a:1", "b:1"))


def ended(session: str, prompt: int, *, known: int = 0, batch: int = 1) -> EndedTurn:
    return EndedTurn(SessionId(session), prompt, 0, known, batch)


def learning_state(settings: Settings, policy: str = "ownerserve") -> RouterState:
    learning = Learning(spilled_to=Tier.DISK)
    state = RouterState(make_policy(policy, settings), settings=settings, learning=learning)
    for worker in WORKERS:
        state.handle(WorkerUp(worker), 0.0)
    return state


def turn(state: RouterState, session: str, prompt: int, now: float) -> Dispatch:
    """One whole turn, whose answer has 100 tokens."""
    dispatch = state.handle(Arrive(SessionId(session), prompt * 4), now)
    assert isinstance(dispatch, Dispatch)
    state.handle(Done(dispatch.receipt, Usage(prompt, 100, 0)), now + 0.5)
    return dispatch


def agents(state: RouterState, *, turns: int, sessions: int = 8) -> None:
    """Sessions take turns: each prompt is the context so far and 900 tokens."""
    for number in range(turns):
        prompt = 20_000 + number // sessions * 1_000
        turn(state, f"s{number % sessions}", prompt, float(number))


def derived_of(settings: Settings) -> list[float]:
    return [getattr(settings, name) for name in DERIVED]


def test_what_was_taken_to_be_so_before_is_gone_once_turns_were_seen() -> None:
    """The check that no constant is of a recorded trace: whatever stands in the defaults, the same
    turns lead to the same settings."""
    states = [
        learning_state(derive(DEFAULT_SPEED, prior, spilled_to=Tier.DISK))
        for prior in (SMALL, LARGE)
    ]
    first, other = (derived_of(state.settings) for state in states)
    assert all(one != two for one, two in zip(first, other, strict=True))
    for state in states:
        agents(state, turns=LEARNT_FROM - 1)
    assert [derived_of(state.settings) for state in states] == [first, other]
    for state in states:
        turn(state, "s7", 36_000, LEARNT_FROM)
    learnt, same = (state.settings for state in states)
    assert learnt == same
    facts = states[0].learning.facts if states[0].learning else None
    assert facts is not None and 27_000 <= facts.context_tokens_p50 <= 29_000
    assert 33_000 <= facts.context_tokens_p90 <= 35_000
    assert facts.addition_tokens_p50 == 900
    assert learnt.hot_ms == move_ms(DEFAULT_SPEED, facts.context_tokens_p50)


@pytest.mark.parametrize("policy", ["ownerserve", "ear"])
def test_the_policies_decide_by_what_was_learnt(policy: str) -> None:
    """Half a second of others' prefill at its owner is calm while T_hot is four seconds, and hot
    once contexts have shown to be short."""
    reasons = []
    for turns in (LEARNT_FROM - 8, LEARNT_FROM):
        state = learning_state(derive(DEFAULT_SPEED, LARGE, spilled_to=Tier.DISK), policy)
        agents(state, turns=turns)
        home = state.sessions.touch(SessionId("s0"), 1000.0).home
        assert home is not None
        load(home, pending=40_000)
        reasons.append(turn(state, "s0", 40_000, 1000.0).reason)
    calm, hot = reasons
    assert calm is DispatchReason.OWNER
    assert hot is not DispatchReason.OWNER


def test_what_is_given_by_hand_stays() -> None:
    state = learning_state(by_hand(DEFAULTS, hot_ms=7.0, cool_s=None))
    agents(state, turns=LEARNT_FROM)
    assert state.settings.hot_ms == 7.0
    assert state.settings.cool_s != DEFAULTS.cool_s
    given = by_hand(DEFAULTS, cool_s=3.0)
    state.steer(Steering(policy=make_policy("ownerserve", given)), given)
    assert state.settings.cool_s == 3.0
    assert state.settings.hot_ms not in (7.0, DEFAULTS.hot_ms)  # what was learnt in the meantime
    state.steer(Steering(policy=make_policy("ownerserve")), DEFAULTS)
    assert state.settings.by_hand == () and state.settings.cool_s not in (3.0, DEFAULTS.cool_s)


def test_without_learning_nothing_changes() -> None:
    state = RouterState(make_policy("ownerserve"))
    state.handle(WorkerUp(WORKERS[0]), 0.0)
    agents(state, turns=2 * LEARNT_FROM)
    assert state.settings is DEFAULTS


def test_constants_are_derived_again_as_sessions_change_and_not_at_every_turn() -> None:
    learning = Learning(spilled_to=Tier.DISK)
    due = [
        now for now in range(LEARNT_FROM + 100)
        if learning.took(ended(f"s{now % 9}", 9_000), float(now))
        and learning.derive((), float(now)) is None
    ]  # fmt: skip
    every = int(DERIVED_EVERY_S)
    assert due == list(range(LEARNT_FROM - 1, LEARNT_FROM + 100, every))


def test_unlike_workers_give_the_median_of_what_each_would() -> None:
    state = RouterState(make_policy("sticky"))
    for number, factor in enumerate((0.5, 1.0, 40.0)):
        speed = DEFAULT_SPEED.__replace__(prefill=DEFAULT_SPEED.prefill.scaled(factor))
        state.handle(WorkerUp(WorkerId(f"w{number}:1"), profile=Profile(speed=speed)), 0.0)
    learning = Learning(spilled_to=Tier.DISK)
    for number in range(LEARNT_FROM):
        learning.took(ended(f"s{number}", 1_000, known=900), 0.0)
    settings = learning.derive(state.fleet.up, 0.0)
    assert settings is not None and learning.facts is not None
    expected = derive(DEFAULT_SPEED, learning.facts, spilled_to=Tier.DISK)
    assert settings.interference == pytest.approx(expected.interference)


def test_one_long_session_does_not_speak_for_all() -> None:
    window = WorkloadWindow()
    for _ in range(TURNS_KEPT):
        window.took(ended("giant", 500_000, known=499_000))
    for number in range(2 * ONE_MAX):
        window.took(ended(f"s{number}", 10_000, known=9_000))
    facts = window.facts()
    assert len(window) == TURNS_KEPT
    assert facts.context_tokens_p50 == 10_000 and facts.context_tokens_p90 == 500_000


def test_facts_are_those_of_the_turns() -> None:
    draw, window = random.Random(3), WorkloadWindow()
    with pytest.raises(ValueError, match="no turn has ended"):
        window.facts()
    prompts = [draw.randrange(1_000, 100_000) for _ in range(TURNS_KEPT)]
    for number, prompt in enumerate(prompts):
        window.took(ended(f"s{number}", prompt, known=prompt // 2, batch=3))
    facts, ranked = window.facts(), sorted(prompts)
    assert facts.context_tokens_p50 == pytest.approx(ranked[TURNS_KEPT // 2], rel=0.01)
    assert facts.context_tokens_p90 == pytest.approx(ranked[TURNS_KEPT * 9 // 10], rel=0.01)
    assert facts.addition_tokens_p50 == pytest.approx(ranked[TURNS_KEPT // 2] / 2, rel=0.01)
    assert facts.reuse_share == pytest.approx(0.5, rel=0.01)
    assert facts.decoding == pytest.approx(3.0)


def test_a_history_that_was_cut_adds_the_last_token_alone() -> None:
    window = WorkloadWindow()
    window.took(ended("s", 100, known=5_000))
    facts = window.facts()
    assert (facts.addition_tokens_p50, facts.reuse_share) == (1, 0.99)


def test_toy_contexts_leave_constants_that_mean_something() -> None:
    tiny = WorkloadFacts(
        context_tokens_p50=1, context_tokens_p90=2, addition_tokens_p50=1, reuse_share=0.0
    )
    assert derive(DEFAULT_SPEED, tiny, spilled_to=Tier.DISK).hot_ms == MOVE_MIN_MS
    pointed = DEFAULT_SPEED.__replace__(kv_bytes_per_token=0.0, kv_bytes_per_sequence=1e6)
    assert derive(pointed, tiny, spilled_to=Tier.DISK).memory_ms_per_gib == 0.0


def test_a_shadow_prices_by_what_was_learnt() -> None:
    counts = ShadowCounts()
    shadow = Shadow("ear", make_policy("ear"), settings=DEFAULTS, counts=counts)
    state = learning_state(DEFAULTS, "sticky")
    state.steer(Steering(policy=make_policy("sticky"), shadow=shadow), DEFAULTS)
    agents(state, turns=2 * LEARNT_FROM)
    assert counts.compared == 2 * LEARNT_FROM


def test_only_the_prior_and_the_window_say_what_sessions_are_like() -> None:
    """No code of ours fits a constant to a trace: WorkloadFacts are made in two places, of which
    neither knows of traces, and derived settings in those and where a fleet is put together."""
    root = Path(ownerserve.__file__).parent
    makes: dict[str, set[str]] = {"WorkloadFacts": set(), "derive": set(), "Settings": set()}
    for path in root.rglob("*.py"):
        name, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text())
        ours = set(makes) if name == "router/settings.py" else _from_settings(tree)
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in ours & makes.keys():
                makes[called.id].add(name)
    assert makes["WorkloadFacts"] == {"router/settings.py", "router/workload.py"}
    assert makes["Settings"] == {"router/settings.py"}
    assert makes["derive"] == {"router/learning.py", "sim/build.py", "cli/placement.py"}
    for path in (root / "router").rglob("*.py"):
        assert "ownerserve.trace" not in path.read_text(), path


FITTED = {
    "BUSY_LEAST", "GROWTH_ASSUMED_SHARE", "GROWTH_ASSUMED_TOKENS", "LOSS", "REFILLS_ASSUMED",
    "REFILL_MOST", "SMALL", "overbooked", "patience_s", "return_s", "share",
}  # fmt: skip
"""Numbers of the door that were chosen on sessions: docs/evidence/admission.md says on which."""
CHOSEN = {
    "BIAS_MAX", "FLOWS_MIN", "FORGET", "IDLE_MAX", "LONGEST_GAP_S", "LOOK_S", "MEMORY_S",
    "MINUTE_S", "OVER_LEAST", "QUICK", "PLACES_MAX", "PLACE_KEPT_S", "PROMISES_MAX",
    "REFILLS_PRICED",
    "RETRY_MAX_S", "RETRY_MIN_S", "RETURNS_KEPT", "RETURNS_LEAST", "SESSIONS_KEPT", "STALE_MAX",
    "STAYS_S", "STAY_EVERY_S", "TIER_SHARE", "TURNS_LEAST", "idle_least_s", "idle_s",
}  # fmt: skip
"""Numbers of it that no session chose: how much is remembered, how often it is looked at, how
long clients and tools may take."""


def test_the_door_has_no_number_of_sessions_but_those_that_are_said() -> None:
    """A number that joins them has to be put with one or the other, and the first kind into the
    document."""
    root = Path(ownerserve.__file__).parent
    folder = root / "router" / "entry"
    numbers: set[str] = set()
    for path in (root / "router" / "admission.py", *folder.rglob("*.py")):
        numbers |= _numbers(ast.parse(path.read_text()))
    assert numbers == FITTED | CHOSEN
    said = (ROOT / "docs" / "evidence" / "admission.md").read_text()
    assert {name for name in FITTED if f"`{name}`" not in said} == set()


def _numbers(tree: ast.Module) -> set[str]:
    """The names to which a module gives a number, and the fields of the door's settings."""
    bodies = [tree.body]
    bodies += [one.body for one in tree.body
               if isinstance(one, ast.ClassDef) and one.name == "SeatSettings"]  # fmt: skip
    found: set[str] = set()
    for node in (one for body in bodies for one in body):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        values = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
        if any(isinstance(one, int | float) for one in values):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {one.id for target in targets for one in ast.walk(target)
                      if isinstance(one, ast.Name)}  # fmt: skip
    return found


def _from_settings(tree: ast.Module) -> set[str]:
    """The names that a module has from the settings."""
    taken = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    ours = (node for node in taken if node.module == "ownerserve.router.settings")
    return {alias.asname or alias.name for node in ours for alias in node.names}
