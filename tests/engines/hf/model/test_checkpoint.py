"""Models by name, by folder, and the refusals."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="the hf engine needs the [engine] extra")

import torch

from ownerserve.cache.effects import ResetState
from ownerserve.cache.layout import Table
from ownerserve.engines.hf.model.checkpoint import load_checkpoint, save_tiny
from ownerserve.engines.hf.model.runner import ALL_LOGITS, DecodeRow, ModelRunner
from ownerserve.engines.hf.model.tiny import TINY_MODELS
from ownerserve.engines.hf.model.tokenizer import EOS_ID, PRINTABLE_IDS, VOCAB_SIZE
from ownerserve.kv.errors import InvalidInput

pytestmark = pytest.mark.engine


def prompt_logits(model, tokens):
    runner = ModelRunner(model)
    runner.allocate({c.name: 8 for c in runner.layout.components}, 1)
    table = Table({name: list(range(8)) for name in runner.layout.range_names}, 0)
    runner.apply([ResetState(0)])
    return runner, table, runner.prefill(table, tokens, 0, logits_to_keep=ALL_LOGITS)


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a_saved_folder_is_the_same_model(name, tmp_path):
    save_tiny(name, tmp_path, seed=5)
    made, loaded = load_checkpoint(name, seed=5), load_checkpoint(str(tmp_path))
    assert made.eos_ids == loaded.eos_ids == {EOS_ID}
    assert loaded.tokenizer.encode("héllo<|end|>") == made.tokenizer.encode("héllo<|end|>")
    tokens = list(range(40, 90))
    _, _, ours = prompt_logits(made.model, tokens)
    _, _, theirs = prompt_logits(loaded.model, tokens)
    assert ours.equal(theirs)


def test_a_saved_v4_runs_in_bfloat16(tmp_path):
    """transformers keeps V4's norms in float32, and then fails: they are cast on load."""
    save_tiny("tiny-v4", tmp_path)
    loaded = load_checkpoint(str(tmp_path), dtype=torch.bfloat16)
    _, _, logits = prompt_logits(loaded.model, list(range(40, 90)))
    _, _, exact = prompt_logits(load_checkpoint("tiny-v4").model, list(range(40, 90)))
    assert logits.dtype is torch.bfloat16
    assert (logits - exact).abs().mean().item() <= 0.1


def test_seeds_make_models():
    first, again, other = (load_checkpoint("tiny-v4", seed=seed).model for seed in (1, 1, 2))
    weights = [dict(model.named_parameters()) for model in (first, again, other)]
    for name, weight in weights[0].items():
        assert weight.equal(weights[1][name])
        # Norms and the scales of hyper-connections are ones and zeros in all.
        drawn = weight.ndim > 1 or name.endswith("sinks")
        assert weight.equal(weights[2][name]) != drawn, name


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_greedy_text_is_ascii_and_round_trips(name):
    checkpoint = load_checkpoint(name)
    prompt = checkpoint.tokenizer.encode("<|bos|><|user|>What is an extent?<|end|><|assistant|>")
    runner, table, logits = prompt_logits(checkpoint.model, prompt)
    answer = [int(logits[-1].argmax())]
    for position in range(len(prompt), len(prompt) + 40):
        logits = runner.decode([DecodeRow(table, answer[-1], position)])
        answer.append(int(logits[0].argmax()))
    text = checkpoint.tokenizer.decode(answer)
    assert set(answer) <= set(PRINTABLE_IDS)
    assert checkpoint.tokenizer.encode(text) == answer
    assert len(set(answer)) > 3  # not one letter for ever


def test_unknown_name_lists_what_there_is():
    with pytest.raises(InvalidInput, match=r"model: 'tiny-llama'.*tiny-v4.*checkpoint folder"):
        load_checkpoint("tiny-llama")


@pytest.mark.parametrize("model_type", ["llama", "no_such_model"])
def test_unsupported_family_is_named(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidInput, match=rf"{model_type}.*deepseek_v4"):
        load_checkpoint(str(tmp_path))


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    save_tiny("tiny-qwen3", tmp_path)
    for file in tmp_path.glob("token*"):
        file.unlink()
    with pytest.raises(InvalidInput, match="has no tokenizer; add one of"):
        load_checkpoint(str(tmp_path))


def test_broken_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{model_type")
    with pytest.raises(InvalidInput, match=r"config.json: .*give a JSON object"):
        load_checkpoint(str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(InvalidInput, match="device: cuda"):
        load_checkpoint("tiny-qwen3", device="cuda")


def test_only_safetensors_are_read(tmp_path):
    save_tiny("tiny-qwen3", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match=r"no \*.safetensors"):
        load_checkpoint(str(tmp_path))


def test_vocabulary_is_bytes_and_specials():
    model = load_checkpoint("tiny-qwen3").model
    assert model.config.vocab_size == VOCAB_SIZE == 272
    rows = model.lm_head.weight.abs().sum(dim=1)
    assert rows.nonzero().flatten().tolist() == sorted(PRINTABLE_IDS)
