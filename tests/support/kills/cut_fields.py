"""A pytest plug-in: a field of what other processes answer is cut wherever this one reads it.

    OWNERSERVE_CUT="load kv_bytes_free" python -m pytest -p tests.support.kills.cut_fields TEST

For tests that play a fleet in one process; `cutting` cuts between processes. The readers are
wrapped before anything has imported them by name. A child that a test begins imports this itself
where OWNERSERVE_CUT is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec

from ownerserve.directory.rpc import frames
from ownerserve.kv.wire import headers, inventory, rpc, status
from tests.support.kills.cutting import Cuts

_CUTS = Cuts()
_CUTS.wire = os.environ.get("OWNERSERVE_CUT", "")
KIND = _CUTS.wire.partition(" ")[0]

_ANSWERS = {"outcome": frames, "said": rpc}
_READERS: dict[str, tuple[tuple[Any, str], ...]] = {
    "load": ((headers, "read_answer_line"), (status, "read_status")),
    "unit": ((status, "read_status"),),
    "speed": ((status, "read_status"),),
    "tier": ((status, "read_status"),),
    "page": ((inventory, "decode_page"),),
    "has": ((inventory, "decode_page"),),
    "gone": ((inventory, "decode_page"),),
}


def _without_key(read: Callable[..., Any]) -> Callable[..., Any]:
    def reader(data: bytes, *given: Any, **named: Any) -> Any:
        return read(_CUTS.without(KIND, data), *given, **named)

    return reader


def _without_word(read: Callable[..., Any]) -> Callable[..., Any]:
    def reader(data: bytes, *given: Any, **named: Any) -> Any:
        return read(_CUTS.without_words(KIND, data), *given, **named)

    return reader


def _without_field(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def reader(data: bytes) -> Any:
        version, body, *more = msgspec.msgpack.decode(data)
        for answer in body.get("outcomes", [body]):
            _CUTS.strip(KIND, answer)
        return read(msgspec.msgpack.encode([version, body, *more]))

    return reader


for _module, _name in _READERS.get(KIND, ()):
    _cut = _without_word if KIND in ("has", "gone") else _without_key
    setattr(_module, _name, _cut(getattr(_module, _name)))
if KIND in _ANSWERS:
    _module = _ANSWERS[KIND]
    _module.decode_answer = _without_field(_module.decode_answer)
