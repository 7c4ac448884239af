"""This module describes the admin API as OpenAPI 3.1, from the table of endpoints and the types of
their answers: there is no second account of it. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from ownerserve import __version__
from ownerserve.gateway.admin_api.answers import ErrorAnswer
from ownerserve.gateway.admin_api.endpoints import LAST_DEFAULT, LAST_MAX, Endpoint

JSON = "application/json"
_REF = "#/components/schemas/{name}"


class Key(msgspec.Struct, frozen=True):
    """A key is asked for by the port, as a bearer token."""


def openapi(endpoints: Sequence[Endpoint], *, key: Key | None) -> dict[str, Any]:
    """Return the description of all `endpoints`; with `key` they ask for one."""
    wanted = {ErrorAnswer: None} | dict.fromkeys(_types(endpoints))
    found, parts = msgspec.json.schema_components(list(wanted), ref_template=_REF)
    schemas = dict(zip(wanted, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        paths.setdefault(plain(one.path), {})[one.method.lower()] = _operation(one, schemas, key)
    for part in parts.values():
        part["description"] = inspect.cleandoc(part.get("description", ""))
    components: dict[str, Any] = {"schemas": parts}
    if key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "OwnerServe gateway: the admin port",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": components,
    }


def plain(path: str) -> str:
    """Return a path as the description has it: without what its parameters match."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)


def _types(endpoints: Iterable[Endpoint]) -> Iterable[type[msgspec.Struct]]:
    for one in endpoints:
        if not isinstance(one.answer, str):
            yield one.answer
        if one.takes is not None:
            yield one.takes


def _operation(
    one: Endpoint, schemas: Mapping[type[msgspec.Struct], Any], key: Key | None
) -> dict[str, Any]:
    is_keyed = key is not None and not one.is_public
    said: dict[str, Any] = {"summary": one.summary, "operationId": _name(one)}
    parameters = [_count(name) for name in one.counts] + _in_path(one.path)
    if parameters:
        said["parameters"] = parameters
    if one.takes is not None:
        said["requestBody"] = {"required": True, "content": _json(schemas[one.takes])}
    if isinstance(one.answer, str):
        kind = "object" if one.answer == JSON else "string"
        content: dict[str, Any] = {one.answer: {"schema": {"type": kind}}}
    else:
        content = _json(schemas[one.answer])
    responses = {one.status: content}
    responses |= dict.fromkeys(sorted(_problems(one)), _json(schemas[ErrorAnswer]))
    if is_keyed:
        responses[HTTPStatus.UNAUTHORIZED] = _json(schemas[ErrorAnswer])
        said["security"] = [{"key": []}]
    said["responses"] = {
        str(status.value): {"description": status.phrase, "content": content}
        for status, content in responses.items()
    }
    return said


def _problems(one: Endpoint) -> set[HTTPStatus]:
    """Return the statuses of the problems that an endpoint may answer, but for a missing key."""
    problems = set(one.problems)
    if one.is_change:
        problems.add(HTTPStatus.FORBIDDEN)
    if one.takes is not None or one.counts:
        problems.add(HTTPStatus.BAD_REQUEST)
    return problems


def _json(schema: Any) -> dict[str, Any]:
    return {JSON: {"schema": schema}}


def _name(one: Endpoint) -> str:
    """Return an operation's name, as clients that are made of this call it."""
    words = [word for word in re.split(r"[^a-z]+", plain(one.path)) if word] or ["page"]
    return "_".join([one.method.lower(), *words])


def _count(name: str) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": 0, "maximum": LAST_MAX, "default": LAST_DEFAULT}
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _in_path(path: str) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name in re.findall(r"{(\w+)}", plain(path))
    ]
