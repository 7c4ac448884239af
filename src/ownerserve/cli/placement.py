"""`ownerserve plan placement` shows what each worker would cost a turn, and what a policy
decides."""

from __future__ import annotations

from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ownerserve.cli.options import GPU_COUNT, Count
from ownerserve.cli.output import console_for, json_option, write_json
from ownerserve.cli.pricing import GPU_NAMES, costs_of, number_of, tokens_of
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.kv.messages import Tier
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.kv.units import GIB, parse_bytes
from ownerserve.plan.cost.prices import Medium
from ownerserve.plan.cost.shape import shape_of
from ownerserve.plan.question import model_state
from ownerserve.router.decision import TERMS, Decision, Option, RoutingRequest, classify
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import WorkerUp
from ownerserve.router.policies import ROUTING_POLICIES, make_policy
from ownerserve.router.pricing import PlacementPricer, rank
from ownerserve.router.sessions import Copy
from ownerserve.router.settings import Settings, derive
from ownerserve.router.worker import (
    EVERY_ACTION,
    LOADED_TIERS,
    Load,
    Profile,
    Speed,
    Worker,
    WorkerRole,
)

STEP_CONTEXT_TOKENS = 50_000
"""A decode step reads so much state of each sequence, where nothing was measured."""

STEP_BYTES_PER_MS = 4.0e9

EXAMPLE = "'owner holds=110K pending=60K batch=8'"


@click.command()
@click.argument("config", metavar="CONFIG")
@click.option("--context", default="110K", show_default=True, help="Tokens the session had.")
@click.option("--new", "new_tokens", default="758", show_default=True, help="Tokens it adds.")
@click.option("--answer", default="256", show_default=True, help="Tokens expected back.")
@click.option("--worker", "workers", multiple=True, required=True, metavar="WORDS",
              help="A worker, once for each: owner; holds=TOKENS[:TIER]; pending=TOKENS; batch=N;"
              " free=BYTES and memory=BYTES; role=prefill|decode|hybrid.")  # fmt: skip
@click.option("--stored", help="Tokens of it in the store that all workers share.")
@click.option("--policy", type=click.Choice(ROUTING_POLICIES), default="ownerserve",
              show_default=True, help="Who decides.")  # fmt: skip
@click.option("--gpu", default="H200", show_default=True, help=f"One of {GPU_NAMES}.")
@click.option("--gpus", type=GPU_COUNT, default=1, show_default=True, help="Tensor-parallel GPUs.")
@click.option("--active-params", type=Count(), metavar="N", help="Active parameters, like 3.3B.")
@click.option("--costs", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="Measured costs of a worker, instead of data-sheet defaults.")  # fmt: skip
@json_option
def placement(config: str, json_target: str | None, **options: Any) -> None:
    """Price the ways to place a turn, and say what a policy does and why.

    \b
    ownerserve plan placement qwen3-30b-a3b \\
        --worker 'owner holds=110K pending=60K batch=8' --worker 'pending=2K batch=3'
    ownerserve plan placement qwen3-30b-a3b --new 40K \\
        --worker 'owner holds=110K batch=12 role=decode' --worker 'role=prefill'

    \b
    queue      until the prefilling worker begins    memory        lambda x device memory taken
    compute    prefill and the answer's decode       duplicate     delta x bytes held twice
    network    state from another worker             interference  mu x prefill x who decodes there
    restore    state from a tier, and its replay     (docs/routing.md)
    """
    words = options.pop("workers")
    text = {name: None if value is None else str(value) for name, value in options.items()}
    speed, label, name = speed_of(config, text)
    settings = derive(speed, spilled_to=Tier.DISK)
    fleet, request = _scene(words, text, speed=speed, settings=settings)
    candidates = fleet.candidates(None)
    if not candidates:
        raise InvalidInput("--worker", "none decodes", "give one with role=hybrid or role=decode")
    decision = make_policy(str(text["policy"]), settings).decide(request, candidates)
    ranked = rank(request, candidates, pricer=PlacementPricer(settings), fleet=candidates)
    if json_target != "-":
        title = f"{escape(name)}, {request.turn.value}, costs: {escape(label)}"
        _show(ranked, decision, console_for(json_target), title=title)
    body = {
        "model": name,
        "costs": label,
        "policy": text["policy"],
        "turn": request.turn,
        "settings": settings,
        "decision": _row(decision) | {"reason": decision.reason},
        "ways": [_row(option) | option.terms() | {"total": option.total_ms} for option in ranked],
    }
    write_json(json_target, "plan.placement", body)


def speed_of(config: str, text: dict[str, str | None]) -> tuple[Speed, str, str]:
    """Return a worker's speed, where it comes from, and the model's name."""
    path = find_config(config)
    loaded = read_config(path)
    spec = build_spec(loaded, None)
    shape = shape_of(spec, loaded, active_parameters=number_of(text["active_params"]))
    model = costs_of(text, shape)
    state = model_state(Geometry.of(spec))
    media = {
        tier: Medium(model.load(tier, 1).ms, GIB / model.load(tier, GIB).ms)
        for tier in LOADED_TIERS
    }
    prefill = model.prices().prefill
    read_ms = STEP_CONTEXT_TOKENS * state.range_bytes_per_token / STEP_BYTES_PER_MS
    speed = Speed(
        prefill=prefill,
        step_ms=prefill.a_ms,
        step_ms_per_sequence=read_ms,
        media=media,
        kv_bytes_per_token=state.range_bytes_per_token,
        kv_bytes_per_sequence=float(state.point_bytes),
        replay_tokens=state.exact_replay_tokens or 0,
    )
    return speed, model.label, path.parent.name if path.name == "config.json" else path.stem


def _scene(
    workers: tuple[str, ...], text: dict[str, str | None], *, speed: Speed, settings: Settings
) -> tuple[Fleet, RoutingRequest]:
    """Make the fleet as described, and the turn."""
    fleet, copies, owner = Fleet(), [], None
    for number, words in enumerate(workers):
        said = _words(words)
        worker = _worker(fleet, f"w{number}", said, speed=speed)
        if "holds" in said:
            tokens, _, tier = said["holds"].partition(":")
            copies.append(Copy(worker, worker.life, _one_of(Tier, tier or "device"), _n(tokens)))
        if "owner" in said:
            owner = worker
    if text["stored"] is not None:
        copies.append(Copy(None, 0, Tier.REMOTE, tokens_of(text, "stored")))
    known = tokens_of(text, "context", least=0)
    prompt = known + tokens_of(text, "new_tokens")
    turn = classify(
        turns=1 if owner is not None or not copies else 0,
        known_tokens=known,
        new_tokens=prompt - known,
        is_cold=owner is None,
        limits=settings,
    )
    return fleet, RoutingRequest(
        prompt_tokens=prompt,
        session=SessionId("session"),
        turn=turn,
        turns=1 if known and owner is not None else 0,
        home=owner,
        owner=owner,
        copies=tuple(copies),
        known_tokens=known,
        output_tokens=tokens_of(text, "answer"),
    )


def _worker(fleet: Fleet, name: str, said: dict[str, str], *, speed: Speed) -> Worker:
    memory = _n(said["memory"]) if "memory" in said else 0
    profile = Profile(
        speed=speed,
        actions=EVERY_ACTION,
        role=_one_of(WorkerRole, said.get("role", "hybrid")),
        kv_bytes_total=memory,
    )
    fleet.raise_up(WorkerUp(WorkerId(name), profile=profile))
    worker = fleet[WorkerId(name)]
    used = memory - _n(said["free"]) if "free" in said else 0
    batch = int(said.get("batch", "0"))
    held = int(max(0.0, used - batch * speed.kv_bytes_per_sequence) / speed.kv_bytes_per_token)
    pending = _n(said["pending"]) if "pending" in said else 0
    worker.add(Load(0.0, pending, held, batch))
    return worker


def _words(text: str) -> dict[str, str]:
    """Read `owner holds=110K` as {"owner": "", "holds": "110K"}."""
    known = ("owner", "holds", "pending", "batch", "free", "memory", "role")
    said = {}
    for word in text.split():
        key, _, value = word.partition("=")
        if key not in known:
            mend = f"use {', '.join(known)}, like {EXAMPLE}"
            raise InvalidInput("--worker", f"{key!r} is unknown", mend)
        said[key] = value
    return said


def _n(text: str) -> int:
    return parse_bytes(text, field="--worker")


def _one_of(kind: type[Any], value: str) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(one.value for one in kind)
        raise InvalidInput("--worker", f"{value!r} is unknown", f"use one of {names}") from error


def _row(way: Option | Decision) -> dict[str, Any]:
    """Return a way as JSON values, without its terms."""
    source = way.source
    return {
        "worker": way.worker.id,
        "action": way.action,
        "cached_tokens": way.cached_tokens,
        "moved_tokens": way.moved_tokens,
        "prefill": None if way.prefill is None else way.prefill.id,
        "source": None if source is None else source.worker.id if source.worker else "store",
    }


def _show(ranked: list[Option], decision: Decision, console: Console, *, title: str) -> None:
    """Print the table for people: all ways, cheapest first, what is taken in bold."""
    terms = [name for name in TERMS if any(option.terms()[name] >= 0.05 for option in ranked)]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("way")
    for name in ("cached", *terms, "total ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for option in ranked:
        is_taken = (option.worker, option.action) == (decision.worker, decision.action)
        table.add_row(
            _named(option),
            f"{option.cached_tokens:,}",
            *(f"{option.terms()[name]:,.0f}" for name in terms),
            f"{option.total_ms:,.0f}",
            style="bold" if is_taken else "",
        )
    console.print(table)
    line = f"[bold]taken:[/] {_named(decision)}, reason {decision.reason}"
    if decision.wanted is not None:
        move = decision.wanted
        line += f"; wanted: {move.tokens:,} tokens from {move.source.id} to {move.target.id}"
    console.print(line, highlight=False)


def _named(way: Option | Decision) -> str:
    row = _row(way)
    at = f"{row['worker']} {row['action']}"
    if row["prefill"] is not None:
        return f"{at} at {row['prefill']}"
    return at if row["source"] in (None, row["worker"]) else f"{at} from {row['source']}"
