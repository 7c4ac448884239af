"""This module states a model's state in the simulator's units: cache layout, planner's model,
prices.

A trace names blocks of U tokens. What sees every token in production sees one *unit* for U of them
here: a prompt of 110,000 tokens is 1,720 numbers at U = 64. Bytes stay bytes; a slot is as large
as in production; only positions are counted in units.

    tokens   |-------- B = lcm(U, the model's legal block) --------|      one slot a component
    units    |---- U ----|---- U ----|---- U ----|---- U ----------|      Layout.block_tokens = B/U

Owns the conversion, and no state. Must never round a size down: what does not divide is refused, or
counted as the next whole unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from ownerserve.cache.layout import Component, Layout, Tail
from ownerserve.cache.pools.budget import PoolSizes, share_memory
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry, block_unit, pool_plans
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import Identity, Numerics
from ownerserve.kv.specs import Coverage, ModelSpec, Ring
from ownerserve.plan.cost.model import Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.plan.inputs import ModelState
from ownerserve.plan.question import model_state


class UnitModel(msgspec.Struct, frozen=True):
    """A unit model is one model as the decision classes see it, in units of `unit_tokens` tokens.

    `geometry` is at the block length B that one slot has here, in tokens.
    """

    unit_tokens: int
    geometry: Geometry
    layout: Layout
    state: ModelState

    @property
    def block_tokens(self) -> int:
        """B, the tokens of a slot."""
        return self.geometry.block_tokens

    def units(self, tokens: int) -> int:
        """Return how many units `tokens` tokens take; the last may be partial."""
        return -(-tokens // self.unit_tokens)

    def identity(self) -> Identity:
        """Return the identity of all state in a simulated store: one model, one tenant."""
        spec = self.geometry.spec
        return Identity(
            model_id=spec.family,
            weights="simulated",
            tokenizer=f"{self.unit_tokens} tokens a unit",
            spec_digest=spec.digest(),
            numerics=Numerics(spec.kv_descriptor),
            tenant_salt=bytes(32),
        )


def unit_model(geometry: Geometry, unit_tokens: int) -> UnitModel:
    """Return the model of `geometry` in units. Raises InvalidInput where a unit cuts what can't be
    cut."""
    blocked = _blocked(geometry, unit_tokens)
    layout = unit_layout(blocked, unit_tokens)
    state = model_state(blocked)
    # The planner prices slots, as a node's own model state does: alignment is loaded too.
    slots = dict.fromkeys(Coverage, 0)
    for component in layout.components:
        slots[component.coverage] += component.slot_bytes
    in_units = msgspec.structs.replace(
        state,
        block_tokens=layout.block_tokens,
        range_bytes_per_token=slots[Coverage.RANGE] / layout.block_tokens,
        point_bytes=slots[Coverage.POINT],
        exact_replay_tokens=_whole(state.exact_replay_tokens, unit_tokens),
        bounded_replay_tokens=_whole(state.bounded_replay_tokens, unit_tokens),
    )
    return UnitModel(unit_tokens, blocked, layout, in_units)


def unit_layout(geometry: Geometry, unit_tokens: int) -> Layout:
    """Return the cache's layout in units: slots of B tokens, B a multiple of a unit and of the
    model's legal block."""
    blocked = _blocked(geometry, unit_tokens)
    components = tuple(
        Component(plan.name, plan.coverage, plan.slot_bytes, plan.payload_bytes)
        for plan in pool_plans(blocked)
    )
    if not any(component.coverage is Coverage.RANGE for component in components):
        raise InvalidInput(
            "model",
            f"{geometry.spec.family} keeps no state of token ranges",
            "simulate a model with attention: a prefix tree of blocks has nothing to hold here",
        )
    tails = _tails(blocked.spec, unit_tokens)
    blocks = blocked.block_tokens // unit_tokens
    return Layout(blocks, components, blocked.state_bytes, tails)


def slots_for(layout: Layout, hbm_bytes: int, running: int) -> PoolSizes:
    """Return how the device's bytes are shared, as our engine shares them (cache.pools.budget)."""
    return share_memory(layout, hbm_bytes, max_running=running)


def unit_coefficients(prefill: Coefficients, unit_tokens: int) -> Coefficients:
    """Return a pass's price in units of U tokens: b per U tokens, c per U of them that see U
    others."""
    u = unit_tokens
    return Coefficients(prefill.a_ms, prefill.b_ms * u, prefill.c_ms * u * u)


def unit_defaults(
    prefill: Coefficients, media: Mapping[Tier, Medium], *, unit_tokens: int, label: str
) -> Defaults:
    """Return what a node assumes before it has measured; `prefill` is in tokens."""
    return Defaults(label, unit_coefficients(prefill, unit_tokens), dict(media))


def unit_policy(text: str, unit_tokens: int) -> str:
    """Return a checkpoint policy's name (node.retention) with its period in units, at least one."""
    name, _, period = text.partition(":")
    if name != "periodic" or not period.isdigit():
        return text
    return f"{name}:{_whole(int(period), unit_tokens)}"


def _blocked(geometry: Geometry, unit_tokens: int) -> Geometry:
    if unit_tokens < 1:
        raise InvalidInput("unit_tokens", f"{unit_tokens}", "use the trace's block: 1 or more")
    block = math.lcm(unit_tokens, block_unit(geometry.spec))
    return geometry if geometry.block_tokens == block else Geometry.of(geometry.spec, block)


def _tails(spec: ModelSpec, unit_tokens: int) -> tuple[Tail, ...]:
    """Return the tails whose windows span units. One that closes within every unit is empty at each
    of them, and so is nothing here."""
    found: dict[str, Tail] = {}
    for state in spec.states:
        if not isinstance(state.kind, Ring) or unit_tokens % state.kind.period == 0:
            continue
        period, rest = divmod(state.kind.period, unit_tokens)
        if rest:
            raise InvalidInput(
                "unit_tokens",
                f"{unit_tokens} cuts a window of {state.kind.period} tokens of {state.role}",
                "use a unit that divides it, or that it divides",
            )
        before = found.get(state.role, Tail(state.role.value, period))
        size = before.slot_bytes + state.padded(state.live_bytes)
        found[state.role] = msgspec.structs.replace(before, slot_bytes=size)
    return tuple(found.values())


def _whole(tokens: int | None, unit_tokens: int) -> int | None:
    return None if tokens is None else -(-tokens // unit_tokens)
