"""A prompt's words are what its blocks are named by: its tokens, and in blocks with images (or
other media) what these show. Pure.

    token ids       t t t t | t i i i | i i t t | t t t t    i: placeholder, alike for all images
    high bytes      0 0 0 0 | d d d d | d d d d | 0 0 0 0    d: SHA-256 of the media in the block
    a word          low three bytes: the token; high byte: one of 32 bytes of that digest, in turn

vLLM hashes an image and whatever the request says of its processing (`identifier`); here it is
hashed again, with what the engine does with every image and with where in the block it begins. So
equal words mean equal tokens and equal images at equal places, and positions that follow from an
image's grid (M-RoPE) are equal too. A block without media has the words that it has in a text.
Identifiers that clients make up say nothing of an image, nor do hashes of embeddings that were left
out, which vLLM accepts from whoever has a connector: such requests have no names.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from ownerserve.kv.prefix import TOKEN_BYTES, Packed, pack

DOMAIN = b"ownerserve/media/1"
CONTENT = re.compile(r"[0-9a-f]{64}([0-9a-f]{64})?")
"""vLLM's hashes of content (BLAKE3, SHA-256, SHA-512), in hex."""
HIGH_BYTE = TOKEN_BYTES - 1
"""No vocabulary reaches into it."""


LEAST_BYTES = 64
"""What is seen or heard has so many bytes for each placeholder; a grid alone has fewer."""


def can_name(features: Any) -> bool:
    """Return whether what a request's media show is told by their identifiers."""
    return all(
        CONTENT.fullmatch(str(getattr(feature, "identifier", "")))
        and _bytes_of(feature.data) >= LEAST_BYTES * feature.mm_position.length
        for feature in features or ()
    )


def _bytes_of(data: Any) -> int:
    """Return the bytes of all tensors in an item of vLLM's, a field of it, or a list."""
    if hasattr(data, "element_size"):
        return int(data.numel() * data.element_size())
    if hasattr(data, "values"):
        return sum(map(_bytes_of, data.values()))
    if isinstance(data, list | tuple):
        return sum(map(_bytes_of, data))
    return _bytes_of(data.data) if hasattr(data, "data") else 0


class Words:
    """`Words` makes the words of requests to one engine. `processing` says what the engine does
    with media before it computes: a digest."""

    def __init__(self, block_tokens: int, *, processing: bytes = b"") -> None:
        self._block = block_tokens
        self._processing = processing

    def of(self, request: Any, start: int, end: int) -> Packed:
        """Return the words of the request's tokens [start, end)."""
        return self.of_tokens(request.all_token_ids[start:end], start, _features(request))

    def of_tokens(self, tokens: Any, start: int, features: Any) -> Packed:
        """Return the words of `tokens`, the first of which is the one at `start`; `features` are
        the media of its request."""
        packed = pack(tokens)
        if not features:
            return packed
        words, size, end = bytearray(packed), self._block, start + len(tokens)
        for first in range(start // size * size, end, size):
            if digest := self._digest(features, first, first + size):
                own = range(max(start, first), min(end, first + size))
                high = (own[0] - start) * TOKEN_BYTES + HIGH_BYTE
                beyond = (own[-1] - start + 1) * TOKEN_BYTES
                told = bytes(digest[(at - first) % len(digest)] for at in own)
                words[high:beyond:TOKEN_BYTES] = told
        return bytes(words)

    def _digest(self, features: Any, first: int, last: int) -> bytes:
        """Return a digest of the media in the block of tokens [first, last); empty where there are
        none."""
        digest = None
        for feature in features:
            place = feature.mm_position
            if place.offset < last and first < place.offset + place.length:
                digest = digest or hashlib.sha256(DOMAIN + self._processing)
                told = f"{feature.identifier} {place.offset - first} {place.length};"
                digest.update(told.encode())
        return b"" if digest is None else digest.digest()


def _features(request: Any) -> Any:
    return getattr(request, "mm_features", None)
