"""A worker whose spills take their time, one record after another: `slow_worker STORE READY`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ownerserve.engines.hf.build import WorkerOptions, build_worker
from ownerserve.engines.hf.http.serve import listen, serve, url_of, write_ready_file
from ownerserve.engines.hf.http.server import make_app
from ownerserve.node.vocabulary.settings import NodeSettings
from tests.support.hf.assumed import assume_prices


def main() -> None:
    store, ready = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    assume_prices()
    settings = NodeSettings(spill_after_s=0.0, copies_in_flight=1, copy_bytes_a_tick=1)
    worker = build_worker(
        WorkerOptions(model="tiny-v4", kv_bytes=16 << 20, max_running=2, store=store, node=settings)
    )
    bound = listen("127.0.0.1", 0)
    serve(make_app(worker), bound, on_ready=lambda: write_ready_file(ready, url_of(bound)))


if __name__ == "__main__":
    main()
