"""`ownerserve gateway`: wiring of the router's runtime."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click
import uvloop

from ownerserve.router.gateway.admin import admin_server
from ownerserve.router.gateway.config import Config, parse_worker
from ownerserve.router.gateway.service import Gateway
from ownerserve.router.policies import POLICIES


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--worker",
    "workers",
    metavar="URL",
    multiple=True,
    required=True,
    help="A worker, like http://127.0.0.1:8001. Once for each.",
)
@click.option(
    "--policy",
    type=click.Choice(sorted(POLICIES)),
    default="affinity",
    show_default=True,
    help="affinity: a session stays on one worker, a new one starts where least is pending. "
    "round_robin: each worker in turn, the baseline.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of both ports.")
@click.option("--port", default=0, show_default=True, help="Data port; 0 takes a free one.")
@click.option("--admin-port", default=0, show_default=True, help="Admin port; 0 takes a free one.")
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long live requests may run on after Ctrl-C or SIGTERM; a second one ends at once.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Written when the ports are open: the gateway's URL, then the admin port's, a line each.",
)
def command(
    workers: tuple[str, ...],
    policy: str,
    host: str,
    port: int,
    admin_port: int,
    drain_timeout_s: float,
    ready_file: Path | None,
) -> None:
    """Route OpenAI and Anthropic requests to workers, each session to where its state lies.

    A session is named by a header (x-session-id, Claude Code, Codex, OpenCode, Dynamo, SGLang)
    or a body field (prompt_cache_key, previous_response_id, user). Every answer says in
    x-ownerserve-worker and x-ownerserve-reason where it came from and why.

    \b
    ownerserve gateway --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002 --port 8000
    curl localhost:8000/v1/models
    curl localhost:8000/v1/chat/completions -H 'x-session-id: s1' -d '{"model": ...}'
    curl localhost:ADMIN/status                     workers, load, sessions
    curl localhost:ADMIN/decisions?last=5           where requests went, and why
    curl localhost:ADMIN/metrics                    Prometheus
    """
    config = Config(
        workers=tuple(parse_worker(url) for url in workers),
        policy=policy,
        host=host,
        port=port,
        admin_port=admin_port,
        drain_timeout_s=drain_timeout_s,
    )
    uvloop.run(_serve(config, ready_file))


async def _serve(config: Config, ready_file: Path | None) -> None:
    """Run until SIGINT or SIGTERM, then drain; a second signal ends at once."""
    loop, stop, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: hurry.set() if stop.is_set() else stop.set())
    gateway = Gateway(config)
    await gateway.start()
    admin, listener = admin_server(gateway)
    serving = loop.create_task(admin.serve(sockets=[listener]))
    _announce(gateway, listener.getsockname()[1], ready_file)
    await stop.wait()
    draining, hurrying = loop.create_task(gateway.drain()), loop.create_task(hurry.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        draining.cancel()
        await gateway.stop()
    admin.should_exit = True
    await serving


def _announce(gateway: Gateway, admin_port: int, ready_file: Path | None) -> None:
    """Say where we are; the ready file appears whole or not at all."""
    host, up = gateway.config.host, len(gateway.state.fleet.up)
    data_url, admin_url = f"http://{host}:{gateway.port}", f"http://{host}:{admin_port}"
    click.echo(f"gateway {data_url}  admin {admin_url}  {up} of {len(gateway.pools)} workers up")
    if ready_file is not None:
        part = ready_file.with_name(ready_file.name + ".part")
        part.write_text(f"{data_url}\n{admin_url}\n")
        part.replace(ready_file)
