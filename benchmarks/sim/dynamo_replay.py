"""Dynamo's offline replay of a Mooncake file, in its own environment; one JSON object on stdout.

    PYTHON-OF-ITS-VENV dynamo_replay.py TRACE.jsonl --router round_robin|kv_router
        --workers 8 --blocks 1434 [--requests OUT.jsonl]

Costs are its built-in polynomial (timing_model "polynomial"). CPU seconds are the call's alone:
importing Dynamo is not counted, reading the trace is, for Dynamo does both in one.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from importlib.metadata import version

BLOCK_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--router", default="round_robin")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--requests")
    given = parser.parse_args()

    from dynamo._core import run_mocker_trace_replay

    engine = {
        "backend": "vllm",
        "num_gpu_blocks": given.blocks,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": given.running,
        "max_num_batched_tokens": given.step_tokens,
        "timing_model": {"type": "polynomial"},
    }
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = run_mocker_trace_replay(
        [given.trace],
        extra_engine_args={"engine": engine},
        num_workers=given.workers,
        router_mode=given.router,
        trace_block_size=BLOCK_TOKENS,
        trace_format="mooncake",
        report_jsonl_path=given.requests,
        capture_planner_details=False,
    )
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    found = {
        "version": version("ai-dynamo-runtime"),
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "summary": result.summary,
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
