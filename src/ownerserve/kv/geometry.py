"""A geometry goes from specs to bytes: blocks, components, fixed state, restorable points, replay.

Owns the arithmetic of state sizes. Must never read a configuration or allocate anything.

    tokens      0 ....... B ....... 2B ....... N
    range       [ block  ][ block  ][ part ]         grows; one slot a block and component
    point                 ^        ^                 what is needed to go on there
    live                                     [state] one block a running sequence, never grows

B = k · lcm(compression ratios, page), so that every compressed entry falls into one block.
Formulas: `research/hybrid-kv.md` 1.3 and 5; checked in tests/kv/test_published_figures.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.specs import (
    Coverage,
    LayerSpec,
    ModelSpec,
    Recurrent,
    Ring,
    Role,
    StateSpec,
    Window,
)

MIN_BLOCK_TOKENS = 16

# The carries of both tails of a CSA layer are one point component: neither is of use alone.
POINT_NAME = {Role.CSA_TAIL: "csa_overlap", Role.CSA_INDEX_TAIL: "csa_overlap"}


class ComponentGeometry(msgspec.Struct, frozen=True):
    """A component's geometry sums the sizes of one role over all layers that keep it.

    `block_payload_bytes` is what one block's entries hold, `block_bytes` the same with each
    layer's alignment. `live_bytes` is what a running sequence holds all the time,
    `boundary_bytes` the least to keep at a boundary. Unused ones are 0.
    """

    role: Role
    layers: int
    kinds: tuple[str, ...]
    entry: str
    entry_bytes: int
    tokens_per_entry: int
    bytes_per_token: float
    block_entries: int
    block_payload_bytes: int
    block_bytes: int
    live_bytes: int
    boundary_bytes: int


class PoolPlan(msgspec.Struct, frozen=True):
    """A pool's plan holds the plain sizes of one slot, from which a cache layout is made
    (`cache.layout.Component`).
    """

    name: str
    coverage: Coverage
    slot_bytes: int
    payload_bytes: int


class Geometry(msgspec.Struct, frozen=True):
    """A geometry holds the sizes of a model's state at one block length.

    `bytes_by_ratio` pairs each compression ratio with the bytes of one entry over all layers of
    that ratio; `state_bytes` is the size of one live state block, each layer's part aligned.
    """

    spec: ModelSpec
    block_tokens: int
    components: tuple[ComponentGeometry, ...]
    bytes_by_ratio: tuple[tuple[int, int], ...]
    state_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec, block_tokens: int | None = None) -> Geometry:
        """Make the geometry at the smallest legal block length of 16 tokens or more, or at
        `block_tokens`. Raises InvalidInput when that is no multiple of `block_unit`.
        """
        unit = block_unit(spec)
        if block_tokens is None:
            block_tokens = math.ceil(MIN_BLOCK_TOKENS / unit) * unit
        if block_tokens < 1 or block_tokens % unit:
            raise InvalidInput(
                "block_tokens",
                f"{block_tokens} is no multiple of {unit}",
                f"use a multiple of {unit}, the lcm of the compression ratios and the page",
            )
        return cls(
            spec,
            block_tokens,
            _components(spec, block_tokens),
            _bytes_by_ratio(spec),
            sum(state.padded(state.live_bytes) for state in spec.states),
        )

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes that each further token adds, compressed entries by their share."""
        return sum(component.bytes_per_token for component in self.components)

    @property
    def fixed_bytes_per_sequence(self) -> int:
        """Return the bytes that a running sequence holds whatever its length: windows, tails,
        recurrent state.
        """
        return sum(component.live_bytes for component in self.components)

    @property
    def point_bytes(self) -> int:
        """Return the least bytes that must be kept to go on at one boundary."""
        return sum(component.boundary_bytes for component in self.components)

    @property
    def dense_bytes_per_token(self) -> int:
        """Return the bytes a token of the same model in a PagedAttention-style layout: every layer
        an entry a token.
        """
        return sum(layer.dense_bytes for layer in self.spec.layers)

    def range_bytes(self, tokens: int) -> int:
        """Return the payload bytes of the range state of `tokens` tokens; unfinished entries are in
        the tail.
        """
        return sum(tokens // ratio * size for ratio, size in self.bytes_by_ratio)

    def total_bytes(self, tokens: int) -> int:
        """Return the payload bytes that a running sequence of `tokens` tokens holds: range and live
        state.
        """
        return self.range_bytes(tokens) + self.fixed_bytes_per_sequence

    def allocated_bytes(self, tokens: int) -> int:
        """Return the bytes of memory that a running sequence of `tokens` tokens takes: whole padded
        blocks and its state block.
        """
        blocks = math.ceil(tokens / self.block_tokens)
        return blocks * sum(c.block_bytes for c in self.components) + self.state_bytes

    def sessions_that_fit(self, memory_bytes: int, tokens: int) -> int:
        """Count the running sequences of `tokens` tokens that `memory_bytes` hold, sharing
        nothing.
        """
        return memory_bytes // max(self.allocated_bytes(tokens), 1)

    def restorable_points(self, tokens: int) -> range:
        """Return the boundaries from which a prompt of `tokens` tokens can go on: at most tokens -
        1, since the last token must be computed.
        """
        return range(self.block_tokens, tokens, self.block_tokens)


def block_unit(spec: ModelSpec) -> int:
    """Return the lcm of all compression ratios and the engine's page: the smallest legal block, in
    tokens.
    """
    ratios = (state.tokens_per_entry for state in spec.states if state.coverage is Coverage.RANGE)
    return math.lcm(spec.page_tokens, *ratios)


def exact_replay_tokens(spec: ModelSpec) -> int | None:
    """Count the tokens to recompute, over kept range state, to rebuild every window exactly.

    A window of n rows is right once the n-1 tokens before were seen by a layer whose own input
    was right, so the reaches of the layers add up: sum of (n - 1). None when a layer is
    recurrent: its state depends on every token before.
    """
    if any(isinstance(state.kind, Recurrent) for state in spec.states):
        return None
    return sum(s.kind.tokens - 1 for s in spec.states if isinstance(s.kind, Window))


def pool_plans(geometry: Geometry) -> tuple[PoolPlan, ...]:
    """Return the slot sizes of every component that is kept: a block's for range state, a
    boundary's for point state. What is empty at a boundary (an HCA tail) has no pool.
    """
    plans: dict[str, PoolPlan] = {}
    states = geometry.spec.states
    for state in states:
        if state.coverage is Coverage.RANGE:
            name = state.role.value
            entries = geometry.block_tokens // state.tokens_per_entry
            payload = entries * state.entry.payload_bytes
        else:
            name = POINT_NAME.get(state.role, state.role.value)
            payload = state.boundary_bytes
        if payload:
            before = plans.get(name, PoolPlan(name, state.coverage, 0, 0))
            plans[name] = PoolPlan(
                name,
                state.coverage,
                before.slot_bytes + state.padded(payload),
                before.payload_bytes + payload,
            )
    return tuple(plans.values())


def _bytes_by_ratio(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    sizes: dict[int, int] = {}
    for state in spec.states:
        if ratio := state.tokens_per_entry:
            sizes[ratio] = sizes.get(ratio, 0) + state.entry.payload_bytes
    return tuple(sorted(sizes.items()))


def _components(spec: ModelSpec, block_tokens: int) -> tuple[ComponentGeometry, ...]:
    by_role: dict[Role, list[StateSpec]] = {}
    for state in spec.states:
        by_role.setdefault(state.role, []).append(state)
    ordered = sorted(by_role.items(), key=lambda item: list(Role).index(item[0]))
    return tuple(_component(role, states, block_tokens) for role, states in ordered)


def _component(role: Role, states: Sequence[StateSpec], block_tokens: int) -> ComponentGeometry:
    entries = [block_tokens // (s.tokens_per_entry or block_tokens + 1) for s in states]
    payloads = [n * s.entry.payload_bytes for n, s in zip(entries, states, strict=True)]
    return ComponentGeometry(
        role=role,
        layers=len(states),
        kinds=tuple(dict.fromkeys(describe_kind(state) for state in states)),
        entry=" | ".join(dict.fromkeys(state.entry.describe() for state in states)),
        entry_bytes=max(state.entry.payload_bytes for state in states),
        tokens_per_entry=max(state.tokens_per_entry for state in states),
        bytes_per_token=sum(
            s.entry.payload_bytes / s.tokens_per_entry for s in states if s.tokens_per_entry
        ),
        block_entries=sum(entries),
        block_payload_bytes=sum(payloads),
        block_bytes=sum(s.padded(n) for n, s in zip(payloads, states, strict=True)),
        live_bytes=sum(state.live_bytes for state in states),
        boundary_bytes=sum(state.boundary_bytes for state in states),
    )


def describe_kind(state: StateSpec) -> str:
    """Describe a state's kind in a few characters: 'per token', '1/4 (+4)', 'window 128', 'ring
    8'.
    """
    match state.kind:
        case Window(tokens=tokens):
            return f"window {tokens}"
        case Ring(rows=rows):
            return f"ring {rows}"
        case Recurrent():
            return "fixed"
        case kind:
            overlap = getattr(kind, "overlap", 0)
            ratio = state.tokens_per_entry
            if ratio == 1:
                return "per token"
            return f"1/{ratio} (+{overlap})" if overlap else f"1/{ratio}"


def layer_counts(spec: ModelSpec) -> dict[str, int]:
    """Count the layers of each type, in the order in which the types first appear."""
    counts: dict[str, int] = {}
    layers: Sequence[LayerSpec] = spec.layers
    for layer in layers:
        counts[layer.type] = counts.get(layer.type, 0) + 1
    return counts
