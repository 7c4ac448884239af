"""Under which names the admin port answers: a page whose site's name is looked up anew as 127.0.0.1
(DNS rebinding) reads nothing of it, over the gateway's own processes."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.gateway.process import gateway_process, worker_process

pytestmark = pytest.mark.slow

KEY = "admin-key-of-16-and-more"


def asked(url: str, host: str, path: str = "/status", **headers: str) -> tuple[int, bytes]:
    """Status and body for who asks under this name."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(f"{place.hostname}:{place.port}", timeout=60)
    try:
        connection.request("GET", path, headers={"Host": host, **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_page_under_another_name_reads_nothing(tmp_path: Path, processes: int) -> None:
    with (
        worker_process() as worker,
        gateway_process(tmp_path, [worker.port], "--processes", str(processes)) as running,
    ):
        url = running.admin_url
        port = urlsplit(url).port
        for path in ("/status", "/sessions", "/metrics", "/", "/openapi.json"):
            for host in (
                "evil.test",
                f"evil.test:{port}",
                "127.0.0.1.evil.test",
                "localhost.evil.test",
            ):
                status, body = asked(url, host, path)
                assert status == 403, (host, path)
                assert json.loads(body)["error"]["code"] == "unknown_host"
        known = ("127.0.0.1", f"localhost:{port}", f"LocalHost:{port}", f"[::1]:{port}", "10.0.0.5")
        for host in known:
            assert asked(url, host)[0] == 200, host


def test_with_a_key_any_name_will_do(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(KEY)
    with (
        worker_process() as worker,
        gateway_process(tmp_path, [worker.port], "--admin-key-file", str(key)) as running,
    ):
        held = {"Authorization": f"Bearer {KEY}"}
        assert asked(running.admin_url, "gateway.internal:8900", **held)[0] == 200
        assert asked(running.admin_url, "gateway.internal:8900")[0] == 401
