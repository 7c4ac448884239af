"""`ownerserve plan` prices a restore (or a placement, placement.py) and explains it."""

from __future__ import annotations

from collections.abc import Mapping

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ownerserve.cli.options import GPU_COUNT, Count
from ownerserve.cli.output import console_for, json_option, write_json
from ownerserve.cli.placement import placement
from ownerserve.cli.pricing import GPU_NAMES, costs_of, number_of, tokens_of
from ownerserve.kv.descriptor import load_descriptor
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.messages import Tier
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.kv.units import format_bytes
from ownerserve.plan import explain
from ownerserve.plan.cost.shape import shape_of
from ownerserve.plan.inputs import ENGINES, Exactness, RestoreQuery
from ownerserve.plan.outcome import Explanation
from ownerserve.plan.question import ReturningSession, ask, model_state
from ownerserve.plan.restore import Planner

TIERS = [tier.value for tier in Tier]


class _RestoreByDefault(click.Group):
    """This group takes `plan CONFIG` for `plan restore CONFIG`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["restore", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RestoreByDefault)
def command() -> None:
    """Price a restore or a placement, and explain it.

    \b
    ownerserve plan CONFIG ...               the ways back to a session's state on a worker
    ownerserve plan placement CONFIG ...     the workers that could run its next turn
    """


command.add_command(placement)


@command.command()
@click.argument("config", metavar="CONFIG")
@click.option("--context", default="64K", show_default=True, help="Tokens the session had.")
@click.option(
    "--new", "new_tokens", default="758", show_default=True, help="Tokens this turn adds."
)
@click.option("--shared", help="Tokens it shares with them, when it branches. Default: all.")
@click.option("--tier", type=click.Choice(TIERS), default="disk", show_default=True,
              help="Where the range state (global KV) is.")  # fmt: skip
@click.option("--state-tier", type=click.Choice([*TIERS, "none"]), help="Where point state is"
              " (windows, recurrent); none: nobody kept it. Default: as --tier.")  # fmt: skip
@click.option("--checkpoint-every", metavar="TOKENS", help="Point state stands at these multiples"
              " only. Default: at the end of the context.")  # fmt: skip
@click.option("--engine", type=click.Choice(list(ENGINES)), default="hf", show_default=True,
              help="Whose abilities to plan with.")  # fmt: skip
@click.option("--gpu", default="H200", show_default=True, help=f"One of {GPU_NAMES}.")
@click.option("--gpus", type=GPU_COUNT, default=1, show_default=True, help="Tensor-parallel GPUs.")
@click.option("--active-params", type=Count(), metavar="N", help="Active parameters, like 3.3B.")
@click.option("--kv", metavar="DESCRIPTOR", help="Engine KV descriptor; see `inspect --help`.")
@click.option("--approximate", "allowed", flag_value=Exactness.BOUNDED_REPLAY.value,
              help="Also offer bounded replay, which is not exact.")  # fmt: skip
@click.option("--costs", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="Measured costs of a worker, instead of data-sheet defaults.")  # fmt: skip
@json_option
def restore(config: str, json_target: str | None, **options: str | int | None) -> None:
    """Price the ways back to a session's state, and say why one is taken.

    CONFIG is a model's config.json or the name of a shipped example.

    \b
    ownerserve plan deepseek-v4-pro --context 110K --new 758 --tier disk --gpu H200 --gpus 8
    ownerserve plan deepseek-v4-pro --context 110K --shared 90K --tier host --state-tier none
    ownerserve plan gemma-3-27b --context 64K --tier disk --state-tier none
    ownerserve plan gpt-oss-120b --engine vllm --state-tier none --json -

    \b
    queue      until the engine is free         load       loading that nothing hides
    recompute  replay and prefill               stall      loading left after the compute
    hidden     loading beside queue or compute  memory     lambda x device memory newly taken
    """
    text = {name: None if value is None else str(value) for name, value in options.items()}
    path = find_config(config)
    loaded = read_config(path)
    kv = text["kv"]
    spec = build_spec(loaded, None if kv is None else load_descriptor(kv))
    geometry = Geometry.of(spec)
    shape = shape_of(spec, loaded, active_parameters=number_of(text["active_params"]))
    model = costs_of(text, shape)
    query = _query(text, geometry)
    planner = Planner(model_state(geometry), ENGINES[str(text["engine"])])
    explanation = planner.explain(query, model.prices())
    name = path.parent.name if path.name == "config.json" else path.stem
    if json_target != "-":
        _show(
            explanation,
            console_for(json_target),
            title=f"{escape(name)}, costs: {escape(model.label)}",
        )
    head = {
        "model": name,
        "kv_descriptor": spec.kv_descriptor,
        "costs": model.label,
        "sources": model.sources(),
        "engine": text["engine"],
        "tokens": query.tokens,
        "shared_tokens": query.known_tokens,
        "active_parameters": shape.active_parameters,
    }
    write_json(json_target, "plan", {**head, **explain.to_data(explanation)})


def _query(text: Mapping[str, str | None], geometry: Geometry) -> RestoreQuery:
    tier = Tier(str(text["tier"]))
    state = text["state_tier"]
    held = ReturningSession(
        context_tokens=tokens_of(text, "context", least=0),
        new_tokens=tokens_of(text, "new_tokens"),
        shared_tokens=None if text["shared"] is None else tokens_of(text, "shared", least=0),
        range_tier=tier,
        point_tier=tier if state is None else None if state == "none" else Tier(state),
        checkpoint_every=None if text["checkpoint_every"] is None
        else tokens_of(text, "checkpoint_every"),
    )  # fmt: skip
    return ask(geometry, held, allowed=Exactness(text["allowed"] or Exactness.EXACT))


def _show(explanation: Explanation, console: Console, *, title: str) -> None:
    """Print the table for people: cheapest first, one of each kind before others of the same
    kind."""
    rows = [explain.row_of(way) for way in explain.notable(explanation)]
    shown = [i for i, name in enumerate(explain.COLUMNS) if any(row.ms[i] for row in rows)]
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        width=min(console.width, 120),
    )
    table.add_column("way back", ratio=1)
    for name in ("tokens", "moved", *(f"{explain.COLUMNS[i]}" for i in shown)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name if row.exactness == Exactness.EXACT else f"{row.name}, {row.exactness}",
            f"{row.computed_tokens:,}",
            format_bytes(row.moved_bytes),
            *(f"{row.ms[i]:,.0f}" if row.ms[i] >= 100 else f"{row.ms[i]:.1f}" for i in shown),
            style="bold" if row == explain.row_of(explanation.plan.chosen) else "",
        )
    console.print(table)
    console.print(f"[bold]taken:[/] {escape(explain.summary(explanation.plan))}", highlight=False)
    for reason, positions in explain.grouped(explanation.not_offered).items():
        where = f"at {positions[0]:,}" if len(positions) == 1 else f"{len(positions)} points"
        console.print(f"[dim]not offered: {escape(reason)} ({where})[/]", highlight=False)
