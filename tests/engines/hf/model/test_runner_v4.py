"""DeepSeek-V4 beyond what all families share: real geometry, top-k, exact replay."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the hf engine needs the [engine] extra")

import torch

from ownerserve.cache.effects import LoadPoint, ResetState
from ownerserve.engines.hf.model.tiny import v4_config
from ownerserve.kv.descriptor import TailForm

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"


@pytest.fixture(scope="module", params=TailForm)
def v4(make_lab, request):
    return make_lab(v4_config(), request.param)


@pytest.fixture(scope="module")
def narrow(make_lab):
    """Three window layers of 4 tokens: a replay of one token too few is plain to see."""
    return make_lab(
        v4_config(
            num_hidden_layers=3,
            layer_types=[HCA, CSA, CSA],
            mlp_layer_types=["hash_moe", "moe", "moe"],
            sliding_window=4,
        )
    )


@pytest.fixture(scope="module")
def selective(make_lab):
    """Top-k 8, far fewer than the entries. 16 index heads: with 4, ties at the k-th place."""
    return make_lab(v4_config(index_topk=8, index_n_heads=16))


@pytest.fixture(scope="module", params=TailForm)
def real(make_lab, request):
    """V4's own rates and window."""
    config = v4_config(compress_rates={CSA: 4, HCA: 128}, sliding_window=128)
    return make_lab(config, request.param)


@pytest.mark.parametrize("chunk", [300, 37, 128])
def test_real_geometry(real, text, largest_error, chunk):
    real.release()
    assert real.block == 128
    logits = real.compute(real.sequence(300), text(300), 0, chunk=chunk)
    assert largest_error(logits, real.truth(text(300))) <= TOLERANCE


def test_real_geometry_resumed_then_decoded(real, text, largest_error):
    """A snapshot at 128, and a batch in which one row closes an HCA window of 128."""
    real.release()
    tokens, boundary = text(300), 128
    first = real.sequence(boundary)
    real.compute(first, tokens[:boundary], 0, chunk=128)
    point = real.save(first)
    tables = [real.resume(first, point, at=boundary, upto=300) for _ in range(2)]
    starts = (250, 140)
    for table, start in zip(tables, starts, strict=True):
        logits = real.compute(table, tokens[:start], boundary, chunk=61)
        assert largest_error(logits, real.truth(tokens)[boundary:start]) <= TOLERANCE
    for step in range(8):
        at = [start + step for start in starts]
        for row, position in zip(real.decode(tables, [tokens] * 2, at), at, strict=True):
            assert largest_error(row, real.truth(tokens)[position]) <= TOLERANCE


@pytest.mark.parametrize("chunk", [37, 1])
def test_top_k_below_the_entries(selective, text, largest_error, chunk):
    selective.release()
    tokens = text(120)
    logits = selective.compute(selective.sequence(120), tokens, 0, chunk=chunk)
    assert largest_error(logits, selective.truth(tokens)) <= TOLERANCE


def test_top_k_in_a_batch(selective, text, largest_error):
    selective.release()
    lengths = (60, 97, 130)
    prompts = [text(n + 6) for n in lengths]
    tables = [selective.sequence(len(prompt)) for prompt in prompts]
    for table, prompt, n in zip(tables, prompts, lengths, strict=True):
        selective.compute(table, prompt[:n], 0, chunk=64)
    for step in range(6):
        at = [n + step for n in lengths]
        for row, prompt, p in zip(selective.decode(tables, prompts, at), prompts, at, strict=True):
            assert largest_error(row, selective.truth(prompt)[p]) <= TOLERANCE


def test_a_corrupt_index_shows_when_it_selects(selective, text, largest_error):
    selective.release()
    tokens, boundary = text(128), 96
    source = selective.sequence(boundary)
    selective.compute(source, tokens[:boundary], 0, chunk=32)
    selective.negate("csa_index", source.range["csa_index"][2])
    resumed = selective.resume(source, selective.save(source), at=boundary, upto=128)
    logits = selective.compute(resumed, tokens, boundary, chunk=32)
    assert not largest_error(logits, selective.truth(tokens)[boundary:]) <= TOLERANCE


def replayed(lab, source, tokens, *, length, chunk, write_floor):
    """Rebuild the state at the end of `tokens` by replaying the last `length` of them.

    The state block starts with another sequence's rows in it.
    """
    table = lab.resume(source, {}, at=len(tokens), upto=len(tokens))
    other = lab.sequence(len(tokens))
    lab.compute(other, [255 - t for t in tokens], 0, chunk=64)
    lab.runner.apply([ResetState(table.state), LoadPoint(lab.save(other), table.state)])
    lab.compute(table, tokens, len(tokens) - length, chunk=chunk, write_floor=write_floor)
    return table


def point_values(lab, point):
    """The numbers of a snapshot."""
    return {
        name: torch.frombuffer(bytearray(lab.runner.read_slot(name, slot)), dtype=torch.float)
        for name, slot in point.items()
    }


def sealed_bytes(lab, table):
    return {
        (name, slot): lab.runner.read_slot(name, slot)
        for name, slots in table.range.items()
        for slot in slots
    }


@pytest.mark.parametrize("chunk", [60, 16, 7, 1])
def test_exact_replay_rebuilds_state_and_leaves_sealed_blocks(v4, text, largest_error, chunk):
    """L(W-1) = 4 * 15 tokens rebuild every window and overlap row from nothing."""
    v4.release()
    boundary, tokens = 144, text(160)
    source = v4.sequence(boundary)
    v4.compute(source, tokens[:boundary], 0, chunk=64)
    expected, sealed = point_values(v4, v4.save(source)), sealed_bytes(v4, source)

    table = replayed(v4, source, tokens[:boundary], length=60, chunk=chunk, write_floor=boundary)

    rebuilt = point_values(v4, v4.save(table))
    for name, values in expected.items():
        assert largest_error(rebuilt[name], values) <= TOLERANCE, name
    assert sealed_bytes(v4, source) == sealed
    v4.reserve(table, 160)
    logits = v4.compute(table, tokens, boundary, chunk=5)
    assert largest_error(logits, v4.truth(tokens)[boundary:]) <= TOLERANCE
    assert sealed_bytes(v4, source) == sealed


def test_replay_needs_every_token(narrow, text, largest_error):
    """At W = 4 and three layers 9 tokens do, 8 do not, nor do 9 without the write floor."""
    boundary, tokens = 96, text(96)

    def error(length, write_floor):
        narrow.release()
        source = narrow.sequence(boundary)
        narrow.compute(source, tokens, 0, chunk=32)
        expected = point_values(narrow, narrow.save(source))["swa"]
        table = replayed(narrow, source, tokens, length=length, chunk=3, write_floor=write_floor)
        return largest_error(point_values(narrow, narrow.save(table))["swa"], expected)

    assert error(length=9, write_floor=boundary) <= TOLERANCE
    assert not error(length=8, write_floor=boundary) <= TOLERANCE
    assert not error(length=9, write_floor=0) <= TOLERANCE
