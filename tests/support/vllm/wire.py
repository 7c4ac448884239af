"""What the test process and a vLLM worker say to each other: frames of MessagePack.

A frame is its length (4 bytes, little-endian) and one array [tag, ...]. The client asks one
question at a time; the worker answers each with a `Reply`.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """First frame: which engine to build. `engine_args` go to vLLM's EngineArgs as they are.

    `imports`: modules to import before it is built. `hooks`: functions of `hooks.py` to call with
    the engine once it stands.
    """

    model: str
    log: str
    engine_args: dict[str, Any] = {}
    env: dict[str, str] = {}
    imports: list[str] = []
    hooks: list[str] = []


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the engine, at temperature 0. `lora`: folder of an adapter; `pictures`: seeds
    of what stands at a prompt's images; `schema`: what an answer has to obey."""

    id: str
    tokens: list[int]
    max_tokens: int = 16
    top: int = 5
    session: str = ""
    priority: int = 0
    salt: str = ""
    lora: str = ""
    pictures: list[int] = []
    schema: dict[str, Any] | None = None
    kv: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request. `top[i]`: token -> logprob for output position i, the chosen one too."""

    id: str
    tokens: list[int]
    top: list[dict[int, float]]
    finish: str
    cached: int
    ttft_s: float
    e2e_s: float
    kv: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True):
    """A worker's answer to one question; `error` is a traceback."""

    value: Any = None
    error: str = ""


def send(sock: socket.socket, message: Any) -> None:
    body = msgspec.msgpack.encode(message)
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> bytes:
    """The next frame's body; raises EOFError when the other end is gone."""
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise EOFError("the other end closed the connection")
        parts += part
    return bytes(parts)
