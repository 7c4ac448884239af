"""vLLM's request, and what its model computes: a row of KV for each token, and the tokens that it
samples, both from the tokens before."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

BLOCK = 4
"""Tokens of a block of vLLM's, in every KV cache group."""
TOKENS = 1 << 20


class RequestStatus(Enum):
    """vLLM's, as far as they are met here."""

    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()


@dataclass(frozen=True)
class Weights:
    """The weights of one time, and the tenant: equal tokens have other rows under others."""

    epoch: int
    cache_salt: str | None

    def rows(self, tokens: Sequence[int]) -> list[int]:
        """What the model computes for each token: it depends on all before it."""
        row, rows = zlib.crc32(f"{self.epoch} {self.cache_salt}".encode()), []
        for token in tokens:
            row = zlib.crc32(token.to_bytes(4, "little"), row)
            rows.append(row)
        return rows


def sampled(tokens: Sequence[int]) -> int:
    """The token that follows: the same one under all weights, so that conversations go on."""
    return zlib.crc32(repr((len(tokens), tokens[-3:])).encode()) % TOKENS


@dataclass(eq=False)
class FakeRequest:
    """vLLM's `Request`: what its scheduler keeps of one, and what our connector reads."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    session_id: str | None = None
    cache_salt: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_output_placeholders: int = 0
    num_preemptions: int = 0
    num_stale_output_tokens: int = 0
    drop_stale_output: bool = False
    is_prefill_chunk: bool = False
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    shared_prefix_boundary: int = 0
    spec_token_ids: list[int] = field(default_factory=list)
    mm_features: list[Any] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    pooling_params: Any = None
    prompt_embeds: Any = None
    prefill_stats: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.all_token_ids: list[int] = []
        self._sampled: list[int] = []
        self.append_output_token_ids(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self.all_token_ids) + len(self.spec_token_ids)

    def is_finished(self) -> bool:
        return self.status.name.startswith("FINISHED")

    def append_output_token_ids(self, token_ids: Sequence[int]) -> None:
        """Add tokens, and the hashes of the blocks that they fill."""
        self.all_token_ids.extend(token_ids)
        for at in range(len(self.block_hashes), self.num_tokens // BLOCK):
            before = self.block_hashes[-1] if at else repr(self.cache_salt).encode()
            own = repr(self.all_token_ids[at * BLOCK : (at + 1) * BLOCK]).encode()
            self.block_hashes.append(b"%08x%08x" % (zlib.crc32(before), zlib.crc32(own, at)))

    # -- what vLLM's requests have not ---------------------------------------------------------

    def tokens_to(self, end: int) -> list[int]:
        """The first `end` tokens: those that will be sampled after those that are known."""
        tokens = self._sampled = self._sampled or list(self.prompt_token_ids)
        while len(tokens) < end:
            tokens.append(sampled(tokens))
        return tokens[:end]
