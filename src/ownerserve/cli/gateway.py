"""`ownerserve gateway` wires the router's runtime."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop

from ownerserve.cli.directory.command import SystemClock
from ownerserve.cli.directory.embedded import OpenedDirectory, embedded_at, opened
from ownerserve.cli.gateway_config import LOG, RereadCommand, read_again, read_settings, words_of
from ownerserve.cli.gateway_file import config_option
from ownerserve.cli.gateway_network import network_options
from ownerserve.cli.gateway_processes import ServedAt, SettingsReader, say_where, serve_processes
from ownerserve.cli.options import PORT, DelayMs, Finite, curve_key_option
from ownerserve.cli.output import OutputFile
from ownerserve.gateway.admin import admin_server
from ownerserve.gateway.checking import check
from ownerserve.gateway.config import Config, PrefillLegs, StreamUsage
from ownerserve.gateway.http.bodies import keep_pages
from ownerserve.gateway.http.door import raise_descriptor_limit
from ownerserve.gateway.logs import LEVELS, LogFormat, set_up
from ownerserve.gateway.processes.table import PROCESSES_MAX
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.rollout.reloading import ReadSettings, Reloading
from ownerserve.gateway.service import Gateway
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import ADMIN, GATEWAY, LOOPBACK
from ownerserve.router.admission import SeatSettings
from ownerserve.router.policies import ROUTING_POLICIES, make_policy
from ownerserve.router.rollout.steering import Mode
from ownerserve.router.settings import DEFAULTS

F = TypeVar("F", bound=Callable[..., Any])


def log_options(command: F) -> F:
    """Give a command the options of its log, which are in its context (`set_up_log`)."""

    def keep(ctx: click.Context, option: click.Parameter, value: object) -> None:
        ctx.meta.setdefault(LOG, {})[option.name] = value

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


def _set_up_log() -> None:
    """Send this process's log where and as its options say."""
    said = click.get_current_context().meta[LOG]
    set_up(LogFormat(said["log_format"]), said["log_level"])


def rollout_options(command: F) -> F:
    """Give a command the options of who decides beside or in place of the policy."""
    policies = click.Choice(ROUTING_POLICIES)
    for option in (
        click.option(
            "--mode",
            type=click.Choice([mode.value for mode in Mode]),
            default=Mode.NORMAL.value,
            show_default=True,
            help="Who decides: the policy; in shadow mode plain least load, and the policy beside"
            " it does nothing; in bypass mode plain least load alone. PUT /mode changes it.",
        ),
        click.option(
            "--shadow",
            type=policies,
            metavar="POLICY",
            help="A policy that decides about the same turns beside --policy; what it would have"
            " done is logged and counted, and not done.",
        ),
        click.option(
            "--canary-policy",
            type=policies,
            metavar="POLICY",
            help="The policy that decides for the canary's sessions. Default: --policy.",
        ),
        click.option(
            "--canary-share",
            type=Finite(min=0, max=1),
            default=0.0,
            show_default=True,
            metavar="SHARE",
            help="The share of sessions that are the canary's, of tenants that have none of their"
            ' own. They run at the workers with arm = "canary" in --config, where there are such.',
        ),
    ):
        command = option(command)
    return command


def queue_options(command: F) -> F:
    """Give a command the options of the queue before the fleet."""
    for option in (
        click.option(
            "--queue-wait",
            "queue_wait_s",
            type=Finite(min=0, min_open=True),
            default=45.0,
            show_default=True,
            metavar="SECONDS",
            help="How long a turn may wait for --max-running; then it is told 429 or 529. A client"
            " may set less in x-ownerserve-deadline-ms.",
        ),
        click.option(
            "--wait-comments",
            "wait_comments_s",
            type=Finite(min=0),
            default=10.0,
            show_default=True,
            metavar="SECONDS",
            help="A streamed turn that waits so long before the fleet gets its head (200) and its"
            " place in line as an SSE comment, and as often again: proxies give up on a silent"
            " server. 0: never.",
        ),
        click.option(
            "--max-waiting",
            type=click.IntRange(1),
            default=256,
            show_default=True,
            metavar="TURNS",
            help="How many turns may wait before the fleet; beyond, the newest of whoever has most"
            " is told 429 or 529.",
        ),
        click.option(
            "--max-running",
            type=click.IntRange(1),
            metavar="TURNS",
            help="How many turns may be under way for each worker that is up; further ones wait in"
            " line, fairly by tenant and class (docs/gateway.md). Default: no limit.",
        ),
    ):
        command = option(command)
    return command


def _only_checks() -> bool:
    """Return whether the command only says what a gateway would find."""
    return bool(click.get_current_context().meta[LOG]["check"])


def _asked(directory: str | None) -> str | None:
    """Return the directory that is opened: a check opens none in its own process."""
    is_own = directory is not None and embedded_at(directory) is not None
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
    cls=RereadCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"\b\nPolicies:\n{_policies()}",
)
@config_option
@click.option(
    "--worker",
    "workers",
    metavar="URL",
    multiple=True,
    help="A worker, like http://127.0.0.1:8001, https://host:8001 or unix:///run/vllm.sock. Once"
    " for each, none where workers are found (--worker-dns). With"
    " =MODEL[,MODEL] after it, it gets turns of these models only; needed where it does not tell."
    " With #canary behind its address it runs the canary's sessions, and no others. With prefill+"
    " or decode+ before it, it takes that part of turns alone (static_pd; docs/gateway.md).",
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
@rollout_options
@click.option(
    "--directory",
    metavar="URL",
    help="Where the workers say which sessions they own, to be asked for those that are new here:"
    " tcp:// or curve://HOST:PORT of `ownerserve directory serve`, valkey(s):// or"
    " sentinel(s)://; embedded, embedded:PORT: this process serves it to nodes of this machine"
    " (7700), embedded:HOST:PORT to others too, with --curve-key-file. Default: none is asked.",
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
    metavar="MS",
    help="T_hot: others' pending prefill at its worker from which a session may move."
    " Default: learnt from the turns that end here and the workers' speeds.",
)
@click.option(
    "--cool-s",
    type=Finite(min=0),
    metavar="SECONDS",
    help="T_cool: how long a session that moved for load's sake stays. Default: learnt, as T_hot.",
)
@click.option(
    "--long-tokens",
    type=click.IntRange(min=1),
    default=DEFAULTS.long_tokens,
    show_default=True,
    metavar="TOKENS",
    help="From so many new tokens on a turn is long: --policy ownerserve may have another worker"
    " compute its prompt, where workers offer that, and a session that has lost so much begins"
    " anew where that is cheapest.",
)
@click.option(
    "--seats",
    type=Finite(min=0),
    default=SeatSettings().share,
    show_default=True,
    metavar="SHARE",
    help="Hold a new session's first turn, and one whose state is gone, while the sessions at work"
    " fill this share of the workers' memory for state, where workers state theirs; host memory"
    " counts that brings state back far sooner than it is computed. Nobody"
    " waits beside a worker that runs nothing, has room and is no session's. 0: all are let in.",
)
@queue_options
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
@network_options
@click.option(
    "--processes",
    type=click.IntRange(1, PROCESSES_MAX),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes that answer clients, each with a part of the sessions; one more has the admin"
    " port. One for each core that the gateway may have (docs/processes.md).",
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
@click.option(
    "--stream-usage",
    type=click.Choice([one.value for one in StreamUsage]),
    default=StreamUsage.ASK.value,
    show_default=True,
    help="ask: streams of chat and completions whose client does not ask for their usage are asked"
    " for it, and the event is kept back. leave: they are not, as for engines that don't know"
    " stream_options; nothing is learnt of such turns then.",
)
@click.option(
    "--prefill-legs",
    type=click.Choice([one.value for one in PrefillLegs]),
    default=PrefillLegs.ONE.value,
    show_default=True,
    help="A turn whose prompt one hf worker computes for another one goes to who answers, who asks"
    " the other one; or to both at once.",
)
@click.option(
    "--carry-on",
    is_flag=True,
    help="Have another worker carry on a stream of chat or completions whose worker dies in its"
    " middle, where the request is greedy or has a seed and both say the same.",
)
@click.option(
    "--hedge-after",
    "hedge_after_s",
    type=Finite(min=0, min_open=True),
    metavar="SECONDS",
    help="Ask a second worker too for a streamed turn of which nothing has come for so long; the"
    " first to begin is passed on, the other is hung up on. Default: never.",
)
@click.option(
    "--news-ms",
    type=DelayMs(),
    default="50",
    show_default=True,
    metavar="MS|none",
    help="What came to or went from a worker's memory is heard so long after it was said, at most;"
    " none: never, and a session is looked for where its turns ran.",
)
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="An OpenTelemetry collector (OTLP/HTTP, like http://127.0.0.1:4318) that gets spans of"
    " turns; needs ownerserve[otel]. Default: none; W3C trace context goes through all the same.",
)
@click.option(
    "--otlp-share",
    type=Finite(min=0, max=1),
    default=1.0,
    show_default=True,
    metavar="SHARE",
    help="The share of turns that are recorded; one that comes with a trace goes by its flag.",
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
    "--drain-notice",
    "drain_notice_s",
    type=Finite(min=0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="How long after Ctrl-C or SIGTERM it serves on while /health says 503: twice the interval"
    " at which a load balancer asks that.",
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
    directory: str | None, curve_key_file: Path | None, ready_file: Path | None, **said: Any
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
    context = click.get_current_context()
    settings, words = read_settings(context), words_of(context)
    _set_up_log()
    again = partial(read_again, command, words)
    if said["processes"] > 1 and not _only_checks():
        read = SettingsReader(settings, again)
        raise SystemExit(serve_processes(read, said["processes"], directory, ready=ready_file))

    async def serve(found: OpenedDirectory | None) -> None:
        if _only_checks():
            await _check(settings.config, found)
        else:
            await _serve(settings, found, ready_file, again=again)

    with opened(_asked(directory), settings.config.fleet_key, SystemClock()) as found:
        uvloop.run(serve(found))


async def _serve(
    settings: ReadSettings,
    directory: OpenedDirectory | None,
    ready_file: Path | None,
    *,
    again: Callable[[], ReadSettings],
) -> None:
    """Run until SIGINT or SIGTERM, then drain; a second signal ends at once. SIGHUP reads the files
    `again`."""
    raise_descriptor_limit()
    keep_pages()
    loop, stop, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)  # one that comes early waits for the start
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: hurry.set() if stop.is_set() else stop.set())
    gateway = Gateway(settings.config, None if directory is None else directory.client)
    gateway.reloading = Reloading(gateway, settings, again)
    admin, listener = admin_server(gateway)
    try:
        await gateway.start()
    except BaseException:
        listener.close()
        raise
    gc.freeze()  # what is here now stays: no collection need look at it again
    listener.listen()  # from here on who asks is heard, if not yet answered
    serving = loop.create_task(admin.serve(sockets=[listener]))
    reloads = loop.create_task(_reload_at(hangup, gateway.reloading))
    served_at = None if directory is None else directory.served_at
    _announce(gateway, listener.getsockname()[1], ready_file, served_at=served_at)
    await stop.wait()
    reloads.cancel()
    draining, hurrying = loop.create_task(gateway.drain()), loop.create_task(hurry.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        draining.cancel()
        await gateway.stop()
    admin.should_exit = True
    await serving


async def _reload_at(hangup: asyncio.Event, reloading: Reloading) -> None:
    """Reload at each hangup, until cancelled."""
    while True:
        await hangup.wait()
        hangup.clear()
        with suppress(InvalidInput):  # the log says what is wrong
            await reloading.reload()


async def _check(config: Config, directory: OpenedDirectory | None) -> None:
    """Say what a gateway would find, a line each; exit 1 when it could not serve with all of
    it. No ready file is written, since nothing is open."""
    if directory is None:
        findings = await check(config, None)
    else:
        findings = await check(config, directory.client, directory.why_silent)
    for finding in findings:
        mark = "ok  " if finding.is_well else "FAIL"
        click.echo(f"{mark} {finding.about}: {finding.found}")
    if not all(finding.is_well for finding in findings):
        raise SystemExit(1)


def _announce(
    gateway: Gateway, admin_port: int, ready_file: Path | None, *, served_at: str | None
) -> None:
    """Say where we are; the ready file appears whole or not at all."""
    places = ServedAt(gateway.config, gateway.url, admin_port, served_at)
    up, workers = len(gateway.state.fleet.up), len(gateway.turns.pools)
    say_where(places, up, workers, ready_file=ready_file)
