"""A Valkey that takes a connection and never answers: each batch is unreachable, in its time."""

from __future__ import annotations

import socket
import threading

import pytest

pytest.importorskip("redis")

from ownerserve.directory.messages import DirectoryRefusal, FindSession, Refused
from ownerserve.directory.valkey.directory import ValkeyDirectory, ValkeyOptions
from ownerserve.directory.valkey.source import parse_source
from ownerserve.kv.ids import SessionId

WAIT_S = 60.0


def test_a_silent_valkey_is_unreachable_each_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = parse_source(f"valkey://127.0.0.1:{listener.getsockname()[1]}", field="url")
        directory = ValkeyDirectory(source, ValkeyOptions(timeout_s=0.2, wait_s=0.1))
        ended = threading.Event()

        def ask() -> None:
            for _ in range(2):
                outcomes = directory.execute([FindSession(SessionId("a"), None)])
                assert outcomes == [Refused(DirectoryRefusal.UNREACHABLE)]
            ended.set()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert ended.is_set()
        directory.close()
