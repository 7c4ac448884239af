"""Layers that keep a key and a value for every token (full attention).

Owns no state: reads and writes the `dense` pool at the span's addresses. New rows are written
first and read back with the rest, so that rows below the write floor stay as they were sealed.
"""

from __future__ import annotations

from torch import Tensor

from ownerserve.engines.hf.state.pools import Pools
from ownerserve.engines.hf.state.span import EntryAddresses, Span
from ownerserve.engines.hf.state.states import DENSE


class DenseLayer:
    """Full attention: `update` takes and gives [R, heads, tokens, dim], as transformers does."""

    def __init__(self, span: Span, pools: Pools, *, layer: int) -> None:
        pool = pools.component(DENSE)
        self._at = span.entries(DENSE, 1, zero_slot=pool.zero_slot)
        self._keys = pool.part(DENSE, "keys")[:, layer]
        self._values = pool.part(DENSE, "values")[:, layer]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far, right-padded in a batch."""
        write_entries(self._keys, self._at, keys.transpose(1, 2))
        write_entries(self._values, self._at, values.transpose(1, 2))
        keys, values = read_entries(self._keys, self._at), read_entries(self._values, self._at)
        return keys.transpose(1, 2), values.transpose(1, 2)


def write_entries(pool: Tensor, at: EntryAddresses, entries: Tensor) -> None:
    """Put new `entries` [R, n, ...] at their addresses in `pool` [slots, per block, ...]."""
    rows, written = at.write_slots.shape
    if not rows or not written:
        return
    if rows < entries.shape[0]:
        entries = entries[at.write_rows]
    pool[at.write_slots, at.write_offsets] = entries[:, entries.shape[1] - written :]


def read_entries(pool: Tensor, at: EntryAddresses) -> Tensor:
    """Gather the entries [R, count, ...] of all rows."""
    return pool[at.blocks].flatten(1, 2)[:, : at.count]
