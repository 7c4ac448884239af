"""Two workers on two hosts that have two cables between them: the state that one reads of the other
keeps to the device that both were given. Skips without root and `ip`.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.netns import inside, link_bytes, on, second_cable, two_hosts  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

AGENT = SessionId("a" * 32)


@pytest.mark.parametrize("bound", ["device", "nothing"])
def test_state_keeps_to_the_device_that_both_workers_were_given(bound: str, tmp_path: Path) -> None:
    """The lender's address is reached by both cables, and the route says the first. Questions go by
    the first in any case; the state, bound to nothing, too."""
    keys, prompt = tmp_path / "fleet.key", text(900, seed=3)
    command = [sys.executable, "-m", "ownerserve.cli.main", "directory", "keys", "--out", str(keys)]
    subprocess.run(command, check=True, capture_output=True)
    with ExitStack() as started:
        hosts = started.enter_context(two_hosts())
        second = second_cable(hosts)
        for place, host in enumerate(second):
            there, by = second[1 - place].address, hosts[1 - place].address
            on(host, "route", "add", f"{there}/32", "via", by, "dev", hosts[place].link)

        def worker(place: int) -> WorkerProcess:
            flags = ["--host-cache", "64MiB", "--dear", "--transfer-roads", "tcp"]
            flags += ["--rpc-host", hosts[place].address, "--curve-key-file", str(keys)]
            flags += ["--transfer-host", second[place].address]
            if bound == "device":
                flags += ["--transfer-interface", second[place].link]
            with inside(hosts[place]):
                process = WorkerProcess(tmp_path, f"worker-{place}", None, *flags)
            started.callback(process.stop)
            return process

        reader, lender = worker(0), worker(1)
        with inside(hosts[1]):
            lender.serve(prompt, AGENT)
        cables = hosts[0], second[0]
        before = [link_bytes(cable) for cable in cables]
        with inside(hosts[0]):
            bring_from = LenderAddress(lender.unit, lender.rpc)
            answer = reader.serve(prompt, AGENT, bring_from=bring_from)
            size = reader.metric("ownerserve_peer_read_bytes_total")
        first, other = (link_bytes(at) - was for at, was in zip(cables, before, strict=True))
    assert_cold("tiny-qwen3", prompt, answer)
    assert answer["cached"] >= 800
    taken, left = (other, first) if bound == "device" else (first, other)
    assert taken > size > 10 * left, f"{size} bytes of state, {first} and {other} on the cables"
