"""`ownerserve gateway` wires the router's runtime."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop
from msgspec.structs import replace

from ownerserve.cli.directory.command import SystemClock
from ownerserve.cli.directory.embedded import OpenedDirectory, opened, port_of
from ownerserve.cli.gateway_file import config_option
from ownerserve.cli.options import PORT, Finite, check_host, curve_key_option, fleet_key
from ownerserve.cli.output import OutputFile
from ownerserve.gateway.admin import admin_server
from ownerserve.gateway.checking import check
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import parse_worker, read_key
from ownerserve.gateway.http.door import raise_descriptor_limit
from ownerserve.gateway.logs import LEVELS, LogFormat, set_up, tell
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.service import Gateway
from ownerserve.gateway.tenants import read_tenants
from ownerserve.kv.listening import ADMIN, GATEWAY, LOOPBACK
from ownerserve.kv.units import MIB
from ownerserve.router.admission import SeatSettings
from ownerserve.router.policies import ROUTING_POLICIES, make_policy
from ownerserve.router.settings import DEFAULTS
from ownerserve.router.worker import DEFAULT_SPEED, Speed

F = TypeVar("F", bound=Callable[..., Any])
_LOG = "ownerserve.gateway.log"
"""Where a command's context has the options of its log, and whether it only checks."""


def log_options(command: F) -> F:
    """Give a command the options of its log, which are in its context (`set_up_log`)."""

    def keep(ctx: click.Context, option: click.Parameter, value: object) -> None:
        ctx.meta.setdefault(_LOG, {})[option.name] = value

    for option in (
        click.option(
            "--check",
            is_flag=True,
            expose_value=False,
            callback=keep,
            help="Ask each worker and the directory once, say what was found, and leave: 0 when a"
            " gateway could serve with all of them, 1 when not, 2 when it would not start.",
        ),
        click.option(
            "--access-log",
            is_flag=True,
            expose_value=False,
            callback=keep,
            help="A log line for each turn, at level info: session, worker, reason, tokens, times.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(LEVELS),
            default="info",
            show_default=True,
            expose_value=False,
            callback=keep,
            help="The least that the log has of what happens to workers, directory and turns.",
        ),
        click.option(
            "--log-format",
            type=click.Choice([form.value for form in LogFormat]),
            default=LogFormat.TEXT.value,
            show_default=True,
            expose_value=False,
            callback=keep,
            help="How it is written to stderr: a line, or a JSON object a line.",
        ),
    ):
        command = option(command)
    return command


def _set_up_log() -> bool:
    """Send this process's log where and as its options say; return whether it has turns."""
    said = click.get_current_context().meta[_LOG]
    set_up(LogFormat(said["log_format"]), said["log_level"])
    return bool(said["access_log"])


OPENING_S = 5.0


def _only_checks() -> bool:
    """Return whether the command only says what a gateway would find."""
    return bool(click.get_current_context().meta[_LOG]["check"])


def _asked(directory: str | None) -> str | None:
    """Return the directory that is opened: a check opens none in its own process."""
    is_own = directory is not None and port_of(directory) is not None
    return None if is_own and _only_checks() else directory


def _policies() -> str:
    """Return a line for each policy, the first of its module, with what it needs of its workers."""
    lines = []
    for name in ROUTING_POLICIES:
        policy = make_policy(name)
        module = sys.modules[type(policy).__module__]
        lines.append(f"{name:<16} {(module.__doc__ or '').partition(chr(10))[0]}")
        if policy.needs:
            needs = ", ".join(sorted(policy.needs))
            lines.append(f"{'':<16} needs {needs}: refuses to start where no worker offers it")
    return "\n".join(lines)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"\b\nPolicies:\n{_policies()}",
)
@config_option
@click.option(
    "--worker",
    "workers",
    metavar="URL",
    multiple=True,
    required=True,
    help="A worker, like http://127.0.0.1:8001 or https://host:8001. Once for each. With"
    " =MODEL[,MODEL] after it, it gets turns of these models only; needed where it does not tell.",
)
@click.option(
    "--worker-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The key that the workers want, alone in a file. It goes with probes and turns in place of"
    " the client's own, which is this gateway's to judge (--tenants-file), or only tells tenants"
    " apart.",
)
@click.option(
    "--worker-ca-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="PEM certificates that are believed of https workers, beside the system's.",
)
@click.option(
    "--policy",
    type=click.Choice(ROUTING_POLICIES),
    default="ownerserve",
    show_default=True,
    metavar="NAME",
    help="Where turns run; all names are listed below.",
)
@click.option(
    "--directory",
    metavar="URL",
    help="Where the workers say which sessions they own, to be asked for those that are new here:"
    " tcp:// or curve://HOST:PORT of `ownerserve directory serve`, valkey://HOST:PORT or"
    " sentinel://HOST:PORT/NAME; embedded or embedded:PORT: this process serves it to nodes of this"
    " machine (7700). Default: none is asked.",
)
@curve_key_option
@click.option(
    "--prefill-ms",
    "token_ms",
    type=Finite(min=0, min_open=True),
    metavar="MS",
    help="What one prefill token takes on a worker that does not state its speed. Default: 0.0122,"
    " of a 30B MoE on an H200.",
)
@click.option(
    "--hot-ms",
    type=Finite(min=0),
    default=DEFAULTS.hot_ms,
    show_default=True,
    metavar="MS",
    help="T_hot: others' pending prefill at its worker from which a session may move.",
)
@click.option(
    "--cool-s",
    type=Finite(min=0),
    default=DEFAULTS.cool_s,
    show_default=True,
    metavar="SECONDS",
    help="T_cool: how long a session that moved for load's sake stays.",
)
@click.option(
    "--seats",
    type=Finite(min=0, min_open=True),
    metavar="SHARE",
    help="Hold a new session's first turn, 45 s at most, while the sessions at work fill this share"
    " of the workers' memory for state (0.9, where more come than fit). Nobody waits beside a"
    " worker that runs nothing, has room and is no session's. Default: all are let in.",
)
@click.option(
    "--host",
    default=LOOPBACK,
    show_default=True,
    help="Address of the data port; off loopback it needs --tenants-file or --allow-remote.",
)
@click.option(
    "--port",
    type=PORT,
    default=GATEWAY.port,
    show_default=True,
    help="Data port; 0 takes a free one.",
)
@click.option(
    "--tenants-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Who is let in, by key, and whose cached state is kept apart (docs/gateway.md). Without it"
    " anybody is, and all share.",
)
@click.option(
    "--allow-remote",
    is_flag=True,
    help="Allow a --host beyond loopback without keys: a proxy in front asks for them.",
)
@click.option(
    "--receipts",
    type=click.Choice([form.value for form in ReceiptForm]),
    default=ReceiptForm.OPAQUE.value,
    show_default=True,
    help="What answers say of the decision: workers by opaque ids and no prices, or all.",
)
@click.option(
    "--admin-host",
    default=LOOPBACK,
    show_default=True,
    help="Address of the admin port; off loopback it needs --admin-key-file.",
)
@click.option(
    "--admin-port",
    type=PORT,
    default=ADMIN.port,
    show_default=True,
    help="Admin port; 0 takes a free one.",
)
@click.option(
    "--admin-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The key that the admin port asks for (`Authorization: Bearer`), alone in a file.",
)
@click.option(
    "--body-memory-mib",
    type=click.IntRange(32),
    default=512,
    show_default=True,
    metavar="MIB",
    help="Memory for the bodies of all requests that wait for an answer; what comes beyond is told"
    " 503 before it is read.",
)
@click.option(
    "--first-byte-timeout",
    "first_byte_timeout_s",
    type=Finite(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a worker that is up may send nothing of a streamed answer, before its first byte"
    " (then another worker is asked) or in its middle.",
)
@click.option(
    "--whole-answer-timeout",
    "whole_answer_timeout_s",
    type=Finite(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="The same for an answer that is not streamed, which comes with its last token.",
)
@log_options
@click.option(
    "--opening",
    "opening_s",
    type=Finite(min=0),
    metavar="SECONDS",
    help="How long after its start sessions that nobody knows go by a hash that all gateways share,"
    " not by load alone. Default: 5 with --directory, which other gateways may ask too, else 0.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=Finite(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long live requests may run on after Ctrl-C or SIGTERM; a second one ends at once.",
)
@click.option(
    "--ready-file",
    type=OutputFile(),
    help="Written when the ports are open: the gateway's URL, the admin port's, and the embedded"
    " directory's, a line each.",
)
def command(
    workers: tuple[str, ...],
    worker_key_file: Path | None,
    worker_ca_file: Path | None,
    policy: str,
    directory: str | None,
    curve_key_file: Path | None,
    token_ms: float | None,
    hot_ms: float,
    cool_s: float,
    seats: float | None,
    tenants_file: Path | None,
    admin_key_file: Path | None,
    body_memory_mib: int,
    ready_file: Path | None,
    receipts: str,
    opening_s: float | None,
    **same: Any,
) -> None:
    """Route OpenAI and Anthropic requests to workers, each session to where its state lies.

    A session is named by a header (x-session-id, Claude Code, Codex, OpenCode, Dynamo, SGLang)
    or a body field (prompt_cache_key, previous_response_id, user), else by what its requests begin
    with. Every answer says in x-ownerserve-worker, -reason and -action where it ran and why; with
    --receipts open also the worker's address, and in -priced what else was considered.

    \b
    ownerserve gateway --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002
    curl localhost:8000/v1/models
    curl localhost:8000/v1/chat/completions -H 'x-session-id: s1' -d '{"model": ...}'
    curl localhost:8900/status                      workers, load, sessions
    curl localhost:8900/decisions?last=5            where requests went, why, at which prices
    curl localhost:8900/metrics                     Prometheus
    """
    check_host(same["host"])
    check_host(same["admin_host"], field="--admin-host")
    key = fleet_key(curve_key_file)
    config = Config(
        workers=tuple(parse_worker(url) for url in workers),
        policy=policy,
        tenants=None if tenants_file is None else read_tenants(tenants_file),
        admin_key=_key(admin_key_file, "--admin-key-file"),
        receipts=ReceiptForm(receipts),
        opening_s=_opening_s(opening_s, directory),
        bodies_max_bytes=body_memory_mib * MIB,
        settings=replace(DEFAULTS, hot_ms=hot_ms, cool_s=cool_s),
        seats=None if seats is None else SeatSettings(share=seats),
        worker_key=_key(worker_key_file, "--worker-key-file"),
        worker_ca_file=worker_ca_file,
        fleet_key=key,
        speed=DEFAULT_SPEED if token_ms is None else _speed(token_ms),
    )
    with opened(_asked(directory), key, SystemClock()) as found:
        config = replace(config, access_log=_set_up_log(), **same)
        uvloop.run((_check if _only_checks() else _serve)(config, found, ready_file))


def _opening_s(given: float | None, directory: str | None) -> float:
    """Return how long the opening window is: a gateway alone needs none."""
    if given is not None:
        return given
    return 0.0 if directory is None or port_of(directory) is not None else OPENING_S


def _key(path: Path | None, option: str) -> str | None:
    return None if path is None else read_key(path, field=option)


def _speed(token_ms: float) -> Speed:
    """Return the speed of a worker whose prefill takes so many ms a token, and all else in
    proportion."""
    prefill = DEFAULT_SPEED.prefill
    return replace(DEFAULT_SPEED, prefill=prefill.scaled(token_ms / prefill.b_ms))


async def _serve(
    config: Config, directory: OpenedDirectory | None, ready_file: Path | None
) -> None:
    """Run until SIGINT or SIGTERM, then drain; a second signal ends at once."""
    raise_descriptor_limit()
    loop, stop, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: hurry.set() if stop.is_set() else stop.set())
    gateway = Gateway(config, None if directory is None else directory.client)
    admin, listener = admin_server(gateway)
    try:
        await gateway.start()
    except BaseException:
        listener.close()
        raise
    listener.listen()  # from here on who asks is heard, if not yet answered
    serving = loop.create_task(admin.serve(sockets=[listener]))
    served_at = None if directory is None else directory.served_at
    _announce(gateway, listener.getsockname()[1], ready_file, served_at=served_at)
    await stop.wait()
    draining, hurrying = loop.create_task(gateway.drain()), loop.create_task(hurry.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        draining.cancel()
        await gateway.stop()
    admin.should_exit = True
    await serving


async def _check(
    config: Config, directory: OpenedDirectory | None, ready_file: Path | None
) -> None:
    """Say what a gateway would find, a line each; exit 1 when it could not serve with all of
    it. No ready file is written, since nothing is open."""
    findings = await check(config, None if directory is None else directory.client)
    for finding in findings:
        mark = "ok  " if finding.is_well else "FAIL"
        click.echo(f"{mark} {finding.about}: {finding.found}")
    if not all(finding.is_well for finding in findings):
        raise SystemExit(1)


def _named(host: str) -> str:
    """Return the host as a URL names it."""
    return f"[{host}]" if ":" in host else host


def _announce(
    gateway: Gateway, admin_port: int, ready_file: Path | None, *, served_at: str | None
) -> None:
    """Say where we are; the ready file appears whole or not at all."""
    config, up = gateway.config, len(gateway.state.fleet.up)
    data_url = f"http://{_named(config.host)}:{gateway.port}"
    admin_url = f"http://{_named(config.admin_host)}:{admin_port}"
    where = [f"gateway {data_url}", f"admin {admin_url}"]
    where += [f"directory {served_at}"] if served_at else []
    click.echo("  ".join([*where, f"{up} of {len(gateway.turns.pools)} workers up"]))
    tell(logging.INFO, "started", data=data_url, admin=admin_url, policy=config.policy, up=up)
    if ready_file is not None:
        part = ready_file.with_name(ready_file.name + ".part")
        places = [data_url, admin_url, *([served_at] if served_at else [])]
        part.write_text("".join(f"{place}\n" for place in places))
        part.replace(ready_file)
