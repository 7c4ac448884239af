"""Can one tenant hear from the time of an answer whether another has sent the same prompt?

Real processes: one worker (hf, or vLLM's CPU build), a gateway with two tenants. For each pair a
victim sends a random prompt of 8 to 512 tokens; then, in random order, the attacker sends that
prompt and one of the same length that nobody has sent, and times both answers (one token, not
streamed, on one connection). The AUC is the share of pairs in which the victim's prompt came back
sooner, ties counted half; 0.5 says nothing, 1 tells all. The control does the same with one tenant
in both parts: it must be far above 0.5, or the measure sees nothing. Cached are the tokens that the
attacker was told. The model is a random Qwen3 of 6 layers, large enough for its prefill to be heard
on a busy core.

    python benchmarks/tenant_timing.py [--pairs 1000] [--vllm PYTHON]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import secrets
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ownerserve.cli.demo.processes import FREE_PORTS, Child
from ownerserve.cli.demo.vllm_processes import VllmSetup, VllmWorker
from ownerserve.engines.hf.model.tiny import random_model
from ownerserve.engines.hf.model.tokenizer import VOCAB_SIZE, byte_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.result import Row, report

SHORTEST, LONGEST = 8, 512
LONG = 64
WORDS = 240
VICTIM, ATTACKER = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
GOAL = 0.55


class Heard(NamedTuple):
    """What a pair told: times of the victim's prompt and of a fresh one, in seconds, and the tokens
    that were said to be cached of each."""

    victims_s: float
    fresh_s: float
    victims_cached: int
    fresh_cached: int


class Tenant:
    """One kept connection with one key."""

    def __init__(self, url: str, model: str, key: str) -> None:
        place = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=120)
        self._model = model
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def ask(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the whole answer, and how many tokens were cached by its word."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        data = json.dumps(body)
        began_s = time.perf_counter()
        self._connection.request("POST", "/v1/completions", data, self._headers)
        answer = self._connection.getresponse()
        read = answer.read()
        took_s = time.perf_counter() - began_s
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {read[:400]!r}")
        details = json.loads(read)["usage"].get("prompt_tokens_details") or {}
        return took_s, details.get("cached_tokens") or 0


def pairs(victim: Tenant, attacker: Tenant, count: int, draw: random.Random) -> list[Heard]:
    """Ask `count` times, interleaved."""
    found = []
    for _ in range(count):
        length = round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())
        sent, fresh = ([draw.randrange(1, WORDS) for _ in range(length)] for _ in range(2))
        victim.ask(sent)
        if draw.random() < 0.5:
            victims, other = attacker.ask(sent), attacker.ask(fresh)
        else:
            other, victims = attacker.ask(fresh), attacker.ask(sent)
        found.append(Heard(victims[0], other[0], victims[1], other[1]))
    return found


def auc(heard: Sequence[Heard]) -> float:
    """The share of pairs in which the victim's prompt came back sooner."""
    wins = sum(
        (one.victims_s < one.fresh_s) + 0.5 * (one.victims_s == one.fresh_s) for one in heard
    )
    return wins / len(heard)


def write_model(folder: Path) -> Path:
    """The checkpoint that both engines serve."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4 * LONGEST,
        tie_word_embeddings=False,
    )
    random_model(config, seed=0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def fleet(folder: Path, vllm: Path | None) -> Iterator[tuple[str, str]]:
    """The gateway's URL, and the model."""
    model = write_model(folder / "model")
    keys = folder / "tenants.toml"
    keys.touch(0o600)
    keys.write_text(
        f'secret = "{secrets.token_hex(32)}"\n'
        f'[tenants]\nvictim.keys = ["{VICTIM}"]\nattacker.keys = ["{ATTACKER}"]\n'
    )
    if vllm is None:
        worker: Child | VllmWorker = Child(
            "worker",
            ["worker", "--model", str(model), "--port", "0", "--kv-memory", "128MiB"],
            folder,
        )
        url = worker.wait_ready(120)[0]
    else:
        worker = VllmWorker("vllm", VllmSetup(vllm, model, 2 * LONGEST, 64 * LONGEST), folder, None)
        url = worker.wait_ready()
    options = ["gateway", *FREE_PORTS, "--worker", url, "--tenants-file", str(keys)]
    gateway = Child("gateway", options, folder)
    try:
        address = gateway.wait_ready(60)[0]
        with urllib.request.urlopen(
            urllib.request.Request(f"{address}/v1/models", headers={"x-api-key": VICTIM})
        ) as answer:
            yield address, json.load(answer)["data"][0]["id"]
    finally:
        gateway.stop()
        worker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment with vLLM")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    engine = "hf" if asked.vllm is None else "vllm"
    with tempfile.TemporaryDirectory() as home, fleet(Path(home), asked.vllm) as (url, model):
        victim, attacker = (Tenant(url, model, key) for key in (VICTIM, ATTACKER))
        pairs(victim, attacker, 10, draw)  # warm
        apart = pairs(victim, attacker, asked.pairs, draw)
        alone = pairs(victim, Tenant(url, model, VICTIM), max(20, asked.pairs // 5), draw)
    told = sum(one.victims_cached + one.fresh_cached for one in apart)
    control = sum(one.victims_cached for one in alone)
    long = [one for one in alone if one.victims_cached >= LONG]
    rows = [
        Row(f"{engine}: AUC, another tenant", "of 1", auc(apart), goal=f"<= {GOAL}"),
        Row(f"{engine}: cached tokens told to another tenant", "tokens", told, goal="0"),
        Row(f"{engine}: AUC, the same tenant (control)", "of 1", auc(alone), goal="far above 0.5"),
        Row(
            f"{engine}: the same, of {LONG} cached tokens and more",
            "of 1",
            auc(long),
            goal="near 1",
        ),
        Row(f"{engine}: cached tokens told to the same tenant", "tokens", control),
    ]
    report(f"tenant_timing_{engine}", rows)


if __name__ == "__main__":
    main()
