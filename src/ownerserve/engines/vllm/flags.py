"""This module says how `vllm serve` is started with OwnerServe, and what in its flags goes wrong
silently. Pure.

Owns the rules; imports no vLLM, so that `ownerserve doctor` runs anywhere.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from ownerserve.engines.vllm.settings import decode
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import format_bytes

CONNECTOR = "OwnerServeConnector"
MULTI = "MultiConnector"
MODULE = "ownerserve.engines.vllm.connector"
OLDEST, NEWEST = (0, 30), (0, 32)
EVENTS_ENDPOINT = "tcp://*:5557"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs, for builds whose `vllm` command does not start."""
DETAILS_FLAG = "--enable-prompt-tokens-details"
SHUTDOWN_FLAG = "--shutdown-timeout"
RETENTION_FLAG = "--prefix-cache-retention-interval"
OPTIONAL_FLAGS = (DETAILS_FLAG, SHUTDOWN_FLAG, RETENTION_FLAG)
"""Flags that are printed where the installed vLLM has them."""
SHUTDOWN_S = 60
"""Requests under way may end and what they leave be stored, durably, before vLLM goes."""
RETENTION_TOKENS = 1024
"""A multiple of every block length that vLLM gives attention; of a recurrent block it need not be
one, and vLLM refuses to start then."""
WINDOW_LAYER = "sliding_attention"
RECURRENT_KEYS = ("linear_num_key_heads", "mamba_d_state", "mamba_n_heads", "ssm_state_size")


class Serve(msgspec.Struct, frozen=True):
    """A `Serve` is one `vllm serve`: environment, arguments, and why the unusual ones."""

    environment: dict[str, str]
    arguments: tuple[str, ...]
    notes: tuple[str, ...]

    def shell(self, launcher: str = "vllm serve") -> str:
        """Return the command as it is typed, one option a line; `launcher` is what takes the
        model."""
        assigned = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines = [" ".join([*assigned, launcher, shlex.quote(self.arguments[0])])]
        for word in self.arguments[1:]:
            if word.startswith("--"):
                lines.append(f"  {word}")
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n".join(lines)


def transfer_config(store: str, **settings: Any) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config`. `settings` are further keys of
    `kv_connector_extra_config`. Raises InvalidInput for a setting that is none."""
    extra = {"store": store, **settings}
    decode(extra)
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def events_config(endpoint: str) -> dict[str, Any]:
    """Return the value of `--kv-events-config`."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}


def serve(
    model: str,
    store: str,
    *,
    config: Mapping[str, Any] | None = None,
    events: str = "",
    known: Collection[str] = OPTIONAL_FLAGS,
) -> Serve:
    """Return the flags for `model`, whose `config.json` is `config`; `events` is an endpoint to
    bind. `known` are those of OPTIONAL_FLAGS that the vLLM to be started has."""
    arguments = [model, "--kv-transfer-config", json.dumps(transfer_config(store))]
    notes = ["\"recompute\": a state that can't be read is computed; vLLM's default fails the turn"]
    if events:
        arguments += ["--kv-events-config", json.dumps(events_config(bindable(events)))]
        notes.append("events: an endpoint with * is bound; another one is connected to, silently")
    if config is not None and is_recurrent(config):
        arguments += ["--mamba-cache-mode", "align"]
        notes.append(
            "align: recurrent state is kept at block boundaries; else there is none to restore"
        )
    for flag, value, note in _optional(config or {}):
        if flag in known:
            arguments += [flag, *value]
            notes.append(note)
    notes.append("VLLM_PLUGINS=ownerserve: /ownerserve/status, /admit, /release; optional")
    return Serve({"VLLM_PLUGINS": "ownerserve"}, tuple(arguments), tuple(notes))


def _optional(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the optional flags for a model: its name, its value, and why."""
    yield DETAILS_FLAG, (), "prompt tokens details: answers say how much of a prompt was cached"
    note = "shutdown timeout: turns under way end and are stored; give the process longer than this"
    yield SHUTDOWN_FLAG, (str(SHUTDOWN_S),), note
    price = checkpoint_bytes(config)
    if price:
        yield (
            RETENTION_FLAG,
            (str(RETENTION_TOKENS),),
            "retention: a branch inside a cached prompt resumes at the last checkpoint before it;"
            f" price: {format_bytes(price)} of vLLM's pool every {RETENTION_TOKENS:,} tokens, in"
            " bfloat16 over all ranks",
        )


def checkpoint_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of one checkpoint of all sliding-window layers, in bfloat16; 0 for a model
    that names none, or that has recurrent layers too."""
    if is_recurrent(config):
        return 0
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    kinds, window = text.get("layer_types"), text.get("sliding_window")
    if not isinstance(kinds, list) or not isinstance(window, int) or WINDOW_LAYER not in kinds:
        return 0
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or 0
    width = text.get("head_dim") or text.get("hidden_size", 0) // (
        text.get("num_attention_heads") or 1
    )
    keys_and_values, bfloat16_bytes = 2, 2
    row_bytes = keys_and_values * int(heads) * int(width) * bfloat16_bytes
    return kinds.count(WINDOW_LAYER) * window * row_bytes


def is_recurrent(config: Mapping[str, Any]) -> bool:
    """Return whether a model's config.json names layers with recurrent state."""
    text = config.get("text_config")
    nested = isinstance(text, Mapping) and is_recurrent(text)
    return nested or any(config.get(key) for key in RECURRENT_KEYS)


def binds(endpoint: str) -> bool:
    """Return whether vLLM's event publisher binds this endpoint. Others it connects to, and where
    nobody listens, as at a worker's own port, every event is lost without a word."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def bindable(endpoint: str) -> str:
    """Return `endpoint` as the publisher binds it, on the same port."""
    return endpoint if binds(endpoint) else f"tcp://*:{endpoint.rpartition(':')[2]}"


def is_supported(version: str) -> bool:
    """Return whether the connector was tested with this version of vLLM."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


def extra_of(connector: str | None, extra: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return our connector's `kv_connector_extra_config`, be it vLLM's connector or a child of its
    MultiConnector; None where it is neither."""
    if connector == CONNECTOR:
        return extra or {}
    if connector != MULTI:
        return None
    ours = (child for child in _children(extra or {}) if child.get("kv_connector") == CONNECTOR)
    return next((child.get("kv_connector_extra_config") or {} for child in ours), None)


def problems_of(transfer: Mapping[str, Any]) -> Iterator[InvalidInput]:
    """Yield what is wrong with a `--kv-transfer-config` that somebody wrote, ours or that of vLLM's
    MultiConnector.

    The outer policy of a MultiConnector is the one that vLLM obeys; a child's is never read.
    """
    if transfer.get("kv_connector") != MULTI:
        yield from _problems_of_ours(transfer)
        return
    yield from _differing(transfer, OUTER)
    children = _children(transfer.get("kv_connector_extra_config") or {})
    ours = [child for child in children if child.get("kv_connector") == CONNECTOR]
    if len(ours) != 1:
        problem = f"{len(ours)} of {len(children)} connectors are {CONNECTOR}"
        yield InvalidInput("kv_connector_extra_config.connectors", problem, "name it once")
    for child in ours:
        yield from _problems_of_ours(child)


OUTER = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
OURS = {"kv_connector": CONNECTOR, "kv_connector_module_path": MODULE, **OUTER}


def _problems_of_ours(transfer: Mapping[str, Any]) -> Iterator[InvalidInput]:
    yield from _differing(transfer, OURS)
    try:
        decode(transfer.get("kv_connector_extra_config") or {})
    except InvalidInput as error:
        yield error


def _differing(transfer: Mapping[str, Any], wanted: Mapping[str, str]) -> Iterator[InvalidInput]:
    for field, value in wanted.items():
        if transfer.get(field) != value:
            problem = f"{transfer[field]!r}" if field in transfer else "is missing"
            yield InvalidInput(field, problem, f'set "{field}": "{value}"')


def _children(extra: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a MultiConnector is made of."""
    given = extra.get("connectors")
    return [child for child in given if isinstance(child, Mapping)] if given else []
