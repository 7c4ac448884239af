"""`ownerserve inspect` shows what state a model keeps and what it costs."""

from __future__ import annotations

import click

from ownerserve.cli.output import console_for, json_option, write_json
from ownerserve.kv.descriptor import NAMED, load_descriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec, default_descriptor
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.kv.units import parse_bytes
from ownerserve.report.state_table import Question, show, to_json

KV_HELP = f"""Engine KV descriptor: a JSON file, or one of {", ".join(NAMED)}.
Default: what the family's published figures assume."""


@click.command()
@click.argument("config", metavar="CONFIG")
@click.option("--kv", metavar="DESCRIPTOR", help=KV_HELP)
@click.option(
    "--context",
    metavar="N",
    default="128K",
    show_default=True,
    help="Tokens of context; K and M are binary (1M = 1,048,576).",
)
@click.option(
    "--hbm", metavar="SIZE", help="Memory left for KV, like 96GiB: how many sessions fit."
)
@click.option("--block", metavar="TOKENS", type=int, help="Block length. Default: the least legal.")
@json_option
def command(
    config: str,
    kv: str | None,
    context: str,
    hbm: str | None,
    block: int | None,
    json_target: str | None,
) -> None:
    """Show what state a model keeps, component by component, and how many sessions fit.

    CONFIG is a model's config.json, a checkpoint folder, or the name of a shipped example
    (deepseek-v4-pro, qwen3-next-80b, gpt-oss-120b, ...; see examples/configs).

    \b
    ownerserve inspect deepseek-v4-pro --context 1M --hbm 96GiB
    ownerserve inspect deepseek-v4-pro --kv fp8_ds_mla-fp4-indexer
    ownerserve inspect path/to/checkpoint --kv bf16 --json -
    ownerserve inspect model/config.json --kv my-engine.json

    \b
    B/token        what each further token adds (compressed entries by their share)
    fixed          what a running sequence holds at any length: windows, tails, recurrent state
    boundary       the least that must be kept to go on there later
    dense layout   every layer an uncompressed entry a token, as a paged KV cache would hold it

    A descriptor file changes the fields of a named one:
    {"base": "fp8_ds_mla", "index": "fp4", "page_tokens": 256}
    """
    path = find_config(config)
    fields = read_config(path)
    descriptor = default_descriptor(fields) if kv is None else load_descriptor(kv)
    geometry = Geometry.of(build_spec(fields, descriptor), block)
    tokens = parse_bytes(context, field="--context")
    if tokens < 1:
        raise InvalidInput("--context", context, "use 1 or more")
    hbm_bytes = None if hbm is None else parse_bytes(hbm, field="--hbm")
    name = path.parent.name if path.name == "config.json" else path.stem
    question = Question(name, tokens, hbm_bytes)
    if json_target != "-":
        show(question, geometry, descriptor, console_for(json_target))
    write_json(json_target, "inspect", to_json(question, geometry, descriptor))
