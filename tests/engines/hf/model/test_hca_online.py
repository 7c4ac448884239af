"""An online HCA tail: one row for all waiting tokens, and nothing else is any different.

That it is right in chunks, batches, forks, restores and replays is in test_runner_families (the
family "tiny-v4 online") and test_runner_v4, against transformers' own cache. Here: what those
comparisons would see if it were wrong, what it saves, and that kept state is the same.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the hf engine needs the [engine] extra")

import torch

from ownerserve.cache.effects import LoadPoint
from ownerserve.cache.layout import TailBook
from ownerserve.engines.hf.model.tiny import tiny_config, v4_config
from ownerserve.engines.hf.state.layers import OnlineTail
from ownerserve.engines.hf.state.states import HCA_TAIL, describe
from ownerserve.kv.descriptor import IndexFormat, KvDescriptor, KvFormat, TailForm
from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.frame import HCA
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec
from ownerserve.kv.specs import Role

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
RAW, ONLINE = TailForm.RAW_ROWS, TailForm.ONLINE


@pytest.fixture(scope="module")
def online(make_lab):
    return make_lab(v4_config(), ONLINE)


def go_on(lab, tokens, *, at, largest_error):
    """Stop in mid-window at `at`, let `lab` be tampered with, then close windows: the error."""
    lab.release()
    table = lab.sequence(len(tokens))
    lab.compute(table, tokens[:at], 0, chunk=7)
    yield table
    logits = lab.compute(table, tokens, at, chunk=5)
    yield largest_error(logits, lab.truth(tokens)[at:])


@pytest.mark.parametrize("part", ["maximum", "sum", "value", None])
def test_corruption_control(online, text, largest_error, part):
    """Each of the three numbers matters; untouched (None) the same run is right."""
    steps = go_on(online, text(80), at=41, largest_error=largest_error)
    table = next(steps)
    if part is not None:
        online.runner.allocated.state.part(HCA_TAIL, part)[table.state] *= 0.5
    error = next(steps)
    assert (error <= TOLERANCE) == (part is None)


def test_the_bias_of_the_first_place_is_taken_back(online, text, largest_error, monkeypatch):
    """transformers adds it to the folded row, whose gates have their biases already."""
    folded = OnlineTail.folded

    def forgetful(self, waiting):
        kv, gate = folded(self, waiting)
        gate[:, 0] += self._bias[0]
        return kv, gate

    monkeypatch.setattr(OnlineTail, "folded", forgetful)
    steps = go_on(online, text(80), at=41, largest_error=largest_error)
    next(steps)
    assert not next(steps) <= TOLERANCE


def test_what_another_window_left_is_not_added(online, text, largest_error):
    """A state block is not cleared when a window closes, nor by a restore."""
    online.release()
    tokens, boundary = text(128), 96
    source = online.sequence(len(tokens))
    online.compute(source, tokens[:boundary], 0, chunk=32)
    point = online.save(source)
    other = online.sequence(64)
    online.compute(other, [255 - t for t in tokens[:60]], 0, chunk=60)  # 12 wait in its block
    online.runner.apply([LoadPoint(point, other.state)])
    source.state = other.state
    logits = online.compute(source, tokens, boundary, chunk=3)
    assert largest_error(logits, online.truth(tokens)[boundary:]) <= TOLERANCE


@pytest.mark.parametrize(("saves", "goes_on"), [(RAW, ONLINE), (ONLINE, RAW)])
def test_kept_state_is_interchangeable(make_lab, text, largest_error, saves, goes_on):
    """Point and range slots of one form are loaded as bytes by the other: same identity."""
    first, second = make_lab(v4_config(), saves), make_lab(v4_config(), goes_on)
    assert first.runner.spec_digest() == second.runner.spec_digest()
    assert first.layout.components == second.layout.components
    tokens, boundary = text(140), 96
    source, table = first.sequence(boundary), second.sequence(len(tokens))
    first.compute(source, tokens[:boundary], 0, chunk=37)
    saved, point = first.save(source), {n: second.slots(n, 1)[0] for n in second.layout.point_names}
    pairs = [(name, saved[name], point[name]) for name in saved]
    for name, slots in source.range.items():
        pairs += [(name, a, b) for a, b in zip(slots, table.range[name], strict=False)]
    for name, out, into in pairs:
        second.runner.write_slot(name, into, first.runner.read_slot(name, out))
    second.runner.apply([LoadPoint(point, table.state)])
    logits = second.compute(table, tokens, boundary, chunk=9)
    assert largest_error(logits, second.truth(tokens)[boundary:]) <= TOLERANCE


def test_an_identity_still_tells_other_models_apart():
    def digest(**changes):
        return describe(v4_config(**changes), torch.float32, hca_tail=ONLINE).digest()

    other_rate = _rates(8)
    assert len({digest(), digest(sliding_window=8), digest(compress_rates=other_rate)}) == 3


@pytest.mark.parametrize("rate", [16, 128])
def test_the_state_block_shrinks_as_inspect_says(rate):
    """`inspect` counts the m' rows of a ring where this engine keeps m'-1: one row apart."""
    config = v4_config(compress_rates=_rates(rate))

    def inspected(tail):
        kv = KvDescriptor(kv=KvFormat.FP32, index=IndexFormat.FP32, tail=tail)
        components = Geometry.of(build_spec(config.to_dict(), kv)).components
        return next(c.live_bytes for c in components if c.role is Role.HCA_TAIL)

    layouts = {form: describe(config, torch.float32, hca_tail=form).layout() for form in TailForm}
    sizes = {form: _tail(layout).slot_bytes for form, layout in layouts.items()}
    assert sizes[ONLINE] == inspected(ONLINE)
    assert sizes[RAW] + _tail(layouts[RAW]).row_bytes == inspected(RAW)
    shrunk = layouts[RAW].state_bytes - layouts[ONLINE].state_bytes
    assert shrunk == sizes[RAW] - sizes[ONLINE] > 0


def _rates(hca):
    return {"compressed_sparse_attention": 4, "heavily_compressed_attention": hca}


def _tail(layout):
    return next(tail for tail in layout.tails if tail.name == HCA_TAIL)


def test_half_precision_loses_no_more_than_raw_rows_do(text, make_lab):
    """The fold is in float32 whatever the model's dtype: its entries are nearer to float32's."""
    tokens = text(100)

    def entries(form, dtype):
        lab = make_lab(v4_config(), form, dtype=dtype)
        table = lab.sequence(len(tokens))
        lab.compute(table, tokens, 0, chunk=7)
        pool = lab.runner.allocated.component(HCA).part(HCA, "entries")
        return pool[table.range[HCA][:6]].float()

    truth = entries(RAW, torch.float32)
    error = {f: (entries(f, torch.bfloat16) - truth).abs().mean().item() for f in TailForm}
    assert 0 < error[ONLINE] <= error[RAW]


def test_a_model_without_hca_layers_refuses_it():
    with pytest.raises(InvalidInput, match=r"hca_tail: online, but qwen3 has no HCA layers"):
        describe(tiny_config("tiny-qwen3"), torch.float32, hca_tail=ONLINE)


def test_the_runner_computes_only_where_the_cache_says_the_tails_are(online, text):
    online.release()
    table = online.sequence(64)
    table.tails = TailBook.at(online.layout.tails, 16)
    with pytest.raises(InvariantViolated, match="computing from 0, but the tails are at 16"):
        online.runner.prefill(table, text(4), 0)
