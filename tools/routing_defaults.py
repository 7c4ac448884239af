"""T_hot, T_cool, lambda and mu for models and GPUs: the procedure of docs/routing.md, as a table.

    python tools/routing_defaults.py [MODEL[@GPU[xN]] ...]

`Settings()` in src/ownerserve/router/settings.py are the first line's values, rounded; a test holds
them to the procedure. Speeds are data-sheet defaults here; a fleet derives from what it measures.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from ownerserve.cli.placement import speed_of
from ownerserve.kv.messages import Tier
from ownerserve.router.settings import PRIOR, derive
from ownerserve.router.worker import DEFAULT_SPEED, Speed

MODELS = (
    "qwen3-30b-a3b@H200",
    "qwen3-30b-a3b@L40S",
    "gpt-oss-120b@H200",
    "qwen3-next-80b@H200x2",
    "llama-3.1-8b@A100",
    "deepseek-v3.2@H200x8",
    "deepseek-v4-pro@H200x8",
)


def speed_named(name: str) -> Speed:
    """`model@GPUxN` by data sheet."""
    model, _, place = name.partition("@")
    gpu, _, count = (place or "H200").partition("x")
    text = {"gpu": gpu, "gpus": count or "1", "costs": None, "active_params": None}
    return speed_of(model, text)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL[@GPU[xN]]", default=MODELS)
    table = Table(title=f"for {PRIOR}", title_justify="left")
    for heading in ("worker", "KV B/token", "T_hot ms", "T_cool s", "lambda = delta ms/GiB", "mu"):
        table.add_column(heading, justify="left" if heading == "worker" else "right")
    speeds = {"DEFAULT_SPEED": DEFAULT_SPEED}
    speeds |= {name: speed_named(name) for name in parser.parse_args().names}
    for name, speed in speeds.items():
        found = derive(speed, spilled_to=Tier.DISK)
        table.add_row(
            name,
            f"{speed.kv_bytes_per_token:,.0f}",
            f"{found.hot_ms:,.0f}",
            f"{found.cool_s:,.1f}",
            f"{found.memory_ms_per_gib:,.0f}",
            f"{found.interference:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
