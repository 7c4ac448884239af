"""What a prompt is named by: its tokens and what its images show, wherever it is cut."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ownerserve.engines.vllm.media import Words, can_name
from ownerserve.kv.prefix import hash_prefix, pack
from tests.support.examples import examples

pytestmark = pytest.mark.engine

B = 32
PLACEHOLDER = 151_655
CAT, DOG = "c" * 64, "d" * 64


def field(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def image(offset: int, length: int = 40, *, shows: str = CAT) -> SimpleNamespace:
    """As vLLM has it: an item maps names to fields, each with a tensor or a list of them."""
    place = SimpleNamespace(offset=offset, length=length)
    fields = {"pixel_values": [field((3, 28 * length, 28))], "grid": field((3,), torch.int64)}
    data = {name: SimpleNamespace(data=value) for name, value in fields.items()}
    return SimpleNamespace(identifier=shows, mm_position=place, data=data)


def request(count: int, *images: SimpleNamespace) -> SimpleNamespace:
    tokens = [1000 + at for at in range(count)]
    for each in images:
        at = each.mm_position
        tokens[at.offset : at.offset + at.length] = [PLACEHOLDER] * at.length
    return SimpleNamespace(all_token_ids=tokens, mm_features=list(images))


def digests(of: Any, words: Words | None = None) -> list[bytes]:
    made = words or Words(B)
    return list(hash_prefix(made.of(of, 0, len(of.all_token_ids)), B))


def alike(one: Any, other: Any) -> int:
    """How many of their first blocks have the same name."""
    pairs = zip(digests(one), digests(other), strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(digests(one)))


def test_a_text_has_the_words_that_it_always_had() -> None:
    of = request(100)
    assert Words(B).of(of, 0, 100) == pack(of.all_token_ids)
    of.mm_features = None
    assert Words(B).of(of, 10, 100) == pack(of.all_token_ids[10:])


@pytest.mark.parametrize(
    ("one", "other", "blocks"),
    [
        (request(160, image(70)), request(160, image(70)), 5),
        (request(160, image(70)), request(160, image(70, shows=DOG)), 2),
        # One placeholder of it in the block is enough.
        (request(160, image(63)), request(160, image(63, shows=DOG)), 1),
        # Others of the same image, at another place and of another length.
        (request(160, image(70)), request(160, image(71)), 2),
        (request(160, image(70, 40)), request(160, image(70, 41)), 2),
        # The same placeholders, cut into images elsewhere.
        (request(160, image(64, 20), image(84, 12)), request(160, image(64, 12), image(76, 20)), 2),
        # A later image changes nothing before its block.
        (request(160, image(10, 20)), request(160, image(10, 20), image(130, 20)), 4),
    ],
)
def test_blocks_are_named_by_what_their_images_show(one: Any, other: Any, blocks: int) -> None:
    assert alike(one, other) == blocks


def test_no_text_has_the_name_of_an_image() -> None:
    seen = request(96, image(0, 96))
    assert alike(seen, request(96)) == 0
    assert alike(seen, SimpleNamespace(all_token_ids=[PLACEHOLDER] * 96, mm_features=[])) == 0


def test_what_an_engine_does_with_images_is_in_their_names() -> None:
    of = request(96, image(40, 10))
    plain, other = digests(of), digests(of, Words(B, processing=b"twice the size"))
    assert [a == b for a, b in zip(plain, other, strict=True)] == [True, False, False]


@pytest.mark.parametrize("seed", range(examples(30)))
def test_pieces_make_the_words_of_the_whole(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.randrange(1, 400)
    offsets = sorted(dice.sample(range(0, 400, 20), dice.randrange(0, 5)))
    of = request(420, *(image(at, dice.randrange(1, 20)) for at in offsets))
    words, cuts = Words(B), sorted(dice.choices(range(count), k=4))
    pieces = [words.of(of, a, b) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    assert b"".join(pieces) == words.of(of, 0, count)


@pytest.mark.parametrize(
    ("identifier", "named"),
    [(CAT, True), ("a" * 128, True), ("my-cat", False), ("r1-image-0", False), ("C" * 64, False)],
)
def test_an_identifier_names_an_image_if_it_is_a_hash(identifier: str, named: bool) -> None:
    assert can_name([image(0), image(50, shows=identifier)]) is named


def test_a_hash_of_what_was_left_out_names_nothing() -> None:
    """vLLM lets a consumer's client send a grid without the embeddings."""
    empty, cached = image(0), image(0)
    del empty.data["pixel_values"]
    cached.data = None
    assert can_name([image(0)])
    assert not can_name([empty])
    assert not can_name([image(0), cached])


def test_a_request_without_media_needs_no_identifiers() -> None:
    assert can_name([]) and can_name(None)
    assert not can_name([object()])
