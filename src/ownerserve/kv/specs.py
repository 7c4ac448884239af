"""Specs say what state a model keeps, layer by layer: the vocabulary that everything else is
counted in.

Owns the definitions of state kinds, roles, entries and layers, and the digest of a model's spec.
Must never read a configuration (kv.registry does) or know a block length (kv.geometry does).

    ModelSpec -> layers -> LayerSpec -> states -> StateSpec(role, kind, entry) -> parts -> Part

A layer holds a *list* of states: a CSA layer of DeepSeek-V4 five, a layer that reads another
layer's keys none, a Falcon-H1 layer attention and recurrent state at once.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import TypeAlias

import msgspec

from ownerserve.kv.messages import RestoreAction

DIGEST_DOMAIN = b"ownerserve/attention-spec/1\n"


class Precision(StrEnum):
    """A precision says how one element is encoded; E4M3, E2M1 and UE8M0 are those of the OCP
    microscaling formats.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP4 = "fp4"
    UE8M0 = "ue8m0"

    @property
    def bits(self) -> int:
        """Return the bits of one element."""
        return _BITS[self]


_BITS = {
    Precision.FP32: 32,
    Precision.BF16: 16,
    Precision.FP16: 16,
    Precision.FP8: 8,
    Precision.FP4: 4,
    Precision.UE8M0: 8,
}


class Part(msgspec.Struct, frozen=True):
    """A part is a run of equal elements in an entry: `nope` in FP8, `rope` in BF16, `scale` in
    UE8M0.
    """

    name: str
    elements: int
    precision: Precision

    @property
    def bits(self) -> int:
        """Return the bits of all its elements."""
        return self.elements * self.precision.bits


class Entry(msgspec.Struct, frozen=True):
    """An entry is what one layer keeps for one position (or one window of positions): its parts in
    order.
    """

    parts: tuple[Part, ...]

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of all parts together; a last half byte counts whole."""
        return -(-sum(part.bits for part in self.parts) // 8)

    def describe(self) -> str:
        """Describe the parts, like '448 fp8 + 64 bf16 + 7 ue8m0 + 1 pad'."""
        return " + ".join(
            f"{part.elements} {'pad' if part.name == 'pad' else part.precision}"
            for part in self.parts
        )


class Role(StrEnum):
    """A role says which state it is. All layers' states of one role form one component."""

    DENSE = "dense"  # keys and values by head
    MLA_LATENT = "mla_latent"  # one latent a token, shared by all heads
    INDEX = "index"  # keys that choose tokens: DSA, MiniMax-M3
    CSA_MAIN = "csa_main"
    CSA_INDEX = "csa_index"
    CSA_TAIL = "csa_tail"  # rows that wait to be compressed, and those of the last window
    CSA_INDEX_TAIL = "csa_index_tail"
    HCA = "hca"
    HCA_TAIL = "hca_tail"
    SWA = "swa"
    RECURRENT = "recurrent"
    CONV = "conv"


class PerToken(msgspec.Struct, frozen=True, tag="per_token"):
    """The state has one entry a token, kept for the whole context."""


class Compressed(msgspec.Struct, frozen=True, tag="compressed"):
    """The state has one entry for every `tokens` tokens, made from them and the `overlap` tokens
    before them.

    CSA: tokens 4, overlap 4 (an entry sees 2m tokens at stride m). HCA: tokens 128, overlap 0.
    """

    tokens: int
    overlap: int = 0


class Window(msgspec.Struct, frozen=True, tag="window"):
    """The state is the entries of the last `tokens` tokens, the present one included."""

    tokens: int


class Ring(msgspec.Struct, frozen=True, tag="ring"):
    """The state is a tail: rows that wait until `period` tokens make an entry, in a ring of `rows`.

    At a multiple of `period` only `carry_rows` of them are still needed, each cut down to
    `carry` (CSA: the Ca half of the last window's m rows; HCA: nothing).
    """

    rows: int
    period: int
    carry_rows: int = 0
    carry: Entry = Entry(())


class Recurrent(msgspec.Struct, frozen=True, tag="recurrent"):
    """The state is one of fixed size that every token changes; it can't be cut, only copied."""


Kind: TypeAlias = PerToken | Compressed | Window | Ring | Recurrent


class Coverage(StrEnum):
    """A coverage is what a kept piece of a state covers: a token range, or one boundary."""

    RANGE = "range"
    POINT = "point"


class Sharding(StrEnum):
    """A sharding is what tensor parallelism does to a state: every rank has all of it, or its own
    heads.
    """

    REPLICATED = "replicated"
    BY_HEAD = "by_head"


class StateSpec(msgspec.Struct, frozen=True):
    """A state spec describes one kind of state that one layer keeps.

    `align_bytes` is what a kernel wants a block's (or a ring's) bytes rounded up to;
    `extra_bytes` what speculative decoding adds to the live form. Neither is identity.
    """

    role: Role
    kind: Kind
    entry: Entry
    sharding: Sharding = Sharding.REPLICATED
    align_bytes: int = 1
    extra_bytes: int = 0

    @property
    def coverage(self) -> Coverage:
        """Return whether the state is kept by ranges of tokens or at boundaries."""
        return Coverage.RANGE if isinstance(self.kind, PerToken | Compressed) else Coverage.POINT

    @property
    def restore_actions(self) -> tuple[RestoreAction, ...]:
        """Return the ways in which this state can come back, cheapest first. Recurrent state has no
        replay.
        """
        return _RESTORE[type(self.kind)]

    @property
    def tokens_per_entry(self) -> int:
        """Count the tokens that one range entry stands for; 0 for state that does not grow."""
        match self.kind:
            case PerToken():
                return 1
            case Compressed(tokens=tokens):
                return tokens
            case _:
                return 0

    def padded(self, payload_bytes: int) -> int:
        """Return `payload_bytes` rounded up to this state's alignment."""
        return -(-payload_bytes // self.align_bytes) * self.align_bytes

    @property
    def live_bytes(self) -> int:
        """Return the payload bytes that a running sequence holds all the time; 0 for range
        state.
        """
        match self.kind:
            case Window(tokens=rows) | Ring(rows=rows):
                return rows * self.entry.payload_bytes + self.extra_bytes
            case Recurrent():
                return self.entry.payload_bytes + self.extra_bytes
            case _:
                return 0

    @property
    def boundary_bytes(self) -> int:
        """Return the least bytes that must be kept to go on at a boundary; 0 for range state.

        W-1 rows of a window (the next token brings its own), the carry of a tail, all of a
        recurrent state.
        """
        match self.kind:
            case Window(tokens=rows):
                return (rows - 1) * self.entry.payload_bytes
            case Ring(carry_rows=rows, carry=carry):
                return rows * carry.payload_bytes
            case Recurrent():
                return self.entry.payload_bytes
            case _:
                return 0


_RESTORE = {
    PerToken: (RestoreAction.LOAD_GLOBAL, RestoreAction.PREFILL),
    Compressed: (RestoreAction.LOAD_GLOBAL, RestoreAction.PREFILL),
    Window: (RestoreAction.LOAD_POINT, RestoreAction.REPLAY, RestoreAction.PREFILL),
    Ring: (RestoreAction.LOAD_POINT, RestoreAction.RECOMPUTE_TAIL, RestoreAction.PREFILL),
    Recurrent: (RestoreAction.LOAD_POINT, RestoreAction.PREFILL),
}


class LayerSpec(msgspec.Struct, frozen=True):
    """A layer spec says what one layer keeps, and whose state it reads besides.

    `kv_source` and `index_source` are layers whose keys or whose top-k choice this one re-uses.
    `dense_bytes` is what this layer would keep for every token if it were plain attention: the
    measure of a PagedAttention-style layout, in which every layer has one entry a token.
    """

    index: int
    type: str
    states: tuple[StateSpec, ...]
    dense_bytes: int
    kv_source: int | None = None
    index_source: int | None = None


class ModelSpec(msgspec.Struct, frozen=True):
    """A model spec is all layers of a model, with the name of the engine KV descriptor that set the
    precisions.

    `draft_layers` counts prediction layers of the checkpoint (MTP) that are not part of `layers`.
    """

    family: str
    kv_descriptor: str
    layers: tuple[LayerSpec, ...]
    page_tokens: int = 1
    draft_layers: int = 0
    max_context: int | None = None

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Return the states of all layers, in the layers' order."""
        return tuple(state for layer in self.layers for state in layer.states)

    def count(self, role: Role) -> int:
        """Count the layers that keep a state of this role."""
        return sum(any(s.role is role for s in layer.states) for layer in self.layers)

    def digest(self) -> bytes:
        """Return the SHA-256 over what the state *means*: layers, roles, kinds and entries.

        Leaves out what is only layout or live form (alignment, sharding, pages, ring length,
        speculation): artifacts of equal digest can be converted into each other.
        """
        meaning = [
            [layer.kv_source, layer.index_source, [_meaning(state) for state in layer.states]]
            for layer in self.layers
        ]
        return hashlib.sha256(DIGEST_DOMAIN + msgspec.json.encode([self.family, meaning])).digest()


def _meaning(state: StateSpec) -> list[object]:
    if isinstance(state.kind, Ring):
        ring = state.kind
        return [state.role, "ring", ring.period, ring.carry_rows, ring.carry]
    return [state.role, state.kind, state.entry]
