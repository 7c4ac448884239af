"""A warm process that has imported what `vllm serve` imports, and forks a server for each order.

    python -m tests.support.vllm.warm_server        in vLLM's own environment

    a line on standard input: an Order ──> fork ── its pid, a line on standard output

`vllm serve` is three processes on a CPU, and each imports vLLM for itself: two thirds of its start.
Here the server is forked, and so are its engine core and that one's worker, which vLLM would spawn
anew. Each server leads a process group of its own; all else is vLLM's.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from tests.support.hf.assumed import assume_prices
from tests.support.vllm.forking import fork_what_vllm_spawns

Prices = Literal["measured", "assumed"]
"""What a server says that computing and loading take: what it measures, or what is assumed before
that. Busy cores measure two equal servers far apart, and a gateway believes them."""


class Order(msgspec.Struct):
    """The flags of one server, whose output goes to `log`."""

    given: list[str]
    log: str
    prices: Prices = "measured"


def _import_vllm() -> None:
    import transformers  # noqa: F401
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # All that our connector imports, and not its own module, which registers its name.
    import ownerserve.engines.vllm.build
    import ownerserve.engines.vllm.replay.padding
    import ownerserve.engines.vllm.worker_side.worker  # noqa: F401


def main() -> None:
    said = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints is no pid
    _import_vllm()
    fork_what_vllm_spawns()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the servers here
    os.write(said, b"ready\n")
    for line in iter(sys.stdin.buffer.readline, b""):
        pid = os.fork()
        if pid == 0:
            _serve(msgspec.json.decode(line, type=Order))
        os.write(said, b"%d\n" % pid)


def _serve(order: Order) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Path(order.log).open("ab") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if order.prices == "assumed":
        assume_prices()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    code = 1
    try:
        sys.argv = ["vllm", *order.given]
        serve()
        code = 0
    except Exception:  # noqa: BLE001  the root of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
