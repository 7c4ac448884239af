"""This module makes the `/v1/models` of a fleet: the union of what its workers serve.

Reads one worker's list; makes the fleet's. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ownerserve.gateway.http.fetching import SmallAnswer
from ownerserve.kv.errors import UNREADABLE

Models = Mapping[str, Mapping[str, Any]]
"""What is said of each model, by its name."""

NO_LIST = (404, 405, 501)
"""An engine that has no list of models answers one of these: it serves whatever it is asked for."""


class Unlearnt(msgspec.Struct, frozen=True):
    """An unlearnt list could not be read; `why` says the reason."""

    why: str


class _List(msgspec.Struct):
    data: list[dict[str, Any]] = []


def read_models(answer: SmallAnswer) -> Models | Unlearnt:
    """Return the models in an answer to GET /v1/models; none for an engine that has no such
    list."""
    if answer.status in NO_LIST:
        return {}
    if answer.status in (401, 403):
        return Unlearnt(f"/v1/models answers {answer.status}; give --worker-key-file")
    if not answer.is_good:
        return Unlearnt(f"/v1/models answers {answer.status or 'no HTTP'}")
    try:
        found = msgspec.json.decode(answer.body, type=_List).data
    except UNREADABLE as error:
        return Unlearnt(f"/v1/models: {error}")
    return {model["id"]: model for model in found if isinstance(model.get("id"), str)}


def stated_models(names: Iterable[str], sequence_tokens: int) -> Models:
    """Return what a worker of ours states, in the words of such a list."""
    more = {"max_model_len": sequence_tokens} if sequence_tokens else {}
    return {
        name: {"id": name, "object": "model", "created": 0, "owned_by": "ownerserve", **more}
        for name in names
    }


def union(lists: Iterable[Models]) -> Models:
    """Return every model once, in the order of its name, with the first worker's words on it."""
    found: dict[str, Mapping[str, Any]] = {}
    for models in lists:
        for name, said in models.items():
            found.setdefault(name, said)
    return dict(sorted(found.items()))


def model_answer(path: bytes, models: Models) -> bytes | None:
    """Return the body for `/v1/models` or `/v1/models/NAME`; None for a model that nobody
    serves."""
    name = path.removeprefix(b"/v1/models").lstrip(b"/").decode("utf-8", "replace")
    if not name:
        return msgspec.json.encode({"object": "list", "data": list(models.values())})
    return msgspec.json.encode(models[name]) if name in models else None
