"""A model whose answer is a hash of every byte that its turn reads: one that is not as it should be
shows in the answer, whoever wrote it.

    after token t     H(t) = SHA-256(H(t - 1), token)
    range state       a block's row for each token: H(t), six times
    point state       H at a boundary, 21 times
    answer            SHA-256 over all rows of the turn, and its H
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.support.node.lending_nodes import SECTIONS, B

VOCABULARY = 256
HASH_BYTES = 32
ROW_BYTES = SECTIONS["dense"].unit_bytes // B
POINT_BYTES = SECTIONS["swa"].unit_bytes
EMPTY = bytes(HASH_BYTES)


def follows(state: bytes, token: int) -> bytes:
    """H behind one more token."""
    return hashlib.sha256(state + token.to_bytes(4, "little")).digest()


def row_of(state: bytes) -> bytes:
    """What a range block has of the token that led to `state`."""
    return state * (ROW_BYTES // HASH_BYTES)


def point_of(state: bytes) -> bytes:
    """What a point slot has at the boundary behind `state`."""
    return state * (POINT_BYTES // HASH_BYTES)


def state_at(point: bytes) -> bytes:
    """The H in a point slot; of one that holds anything else, another one."""
    state = point[:HASH_BYTES]
    return state if point == point_of(state) else hashlib.sha256(point).digest()


def scores(rows: bytes, state: bytes) -> NDArray[np.float32]:
    """Logits behind all rows of a turn; no two are equal."""
    seed, found = hashlib.sha256(rows + state).digest(), b""
    while len(found) < VOCABULARY:
        seed = hashlib.sha256(seed).digest()
        found += seed
    return np.frombuffer(found, np.uint8).astype(np.float32) + np.linspace(0, 0.5, VOCABULARY)


def cold(prompt: Sequence[int], tokens: int) -> list[int]:
    """What an engine answers that has computed all of it."""
    state, rows, said = EMPTY, bytearray(), list[int]()
    for token in prompt:
        state = follows(state, token)
        rows += row_of(state)
    while len(said) < tokens:
        said.append(int(scores(bytes(rows), state).argmax()))
        state = follows(state, said[-1])
        rows += row_of(state)
    return said


def states_of(tokens: Sequence[int]) -> list[bytes]:
    """H behind each token."""
    found, state = [], EMPTY
    for token in tokens:
        state = follows(state, token)
        found.append(state)
    return found
