"""`ownerserve gateway --processes N`: what each process of the gateway runs, and what is said once
all of them are there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import uvloop
from msgspec.structs import replace

from ownerserve.cli.directory.command import SystemClock
from ownerserve.cli.directory.embedded import EMBEDDED, OpenedDirectory, embedded_at, opened
from ownerserve.gateway.config import Config
from ownerserve.gateway.logs import name_process, tell
from ownerserve.gateway.processes.front import run_front
from ownerserve.gateway.processes.layout import ProcessLayout
from ownerserve.gateway.processes.relay import config_of, run_relay
from ownerserve.gateway.processes.supervisor import FRONT, Became, Ready, Supervisor
from ownerserve.gateway.rollout.reloading import ReadSettings, Reloading
from ownerserve.gateway.service import Gateway, web_address


class ServedAt(NamedTuple):
    """The places are where a gateway serves: its ports, and its own directory if it has one."""

    config: Config
    data_url: str
    admin_port: int
    directory: str | None


class SettingsReader(NamedTuple):
    """The settings as they were read, and what reads them again."""

    first: ReadSettings
    again: Callable[[], ReadSettings]


def serve_processes(
    read: SettingsReader, processes: int, directory: str | None, *, ready: Path | None
) -> int:
    """Run a gateway of several processes, or what this one becomes of it, and return the exit code;
    `ready` is written when all are. Raises InvalidInput."""
    config = read.first.config
    config.check()
    layout = ProcessLayout(config, processes)
    url, admin_port = layout.data_url, layout.admin.getsockname()[1]

    def started(front: Ready, relay: Ready) -> None:
        places = ServedAt(config, url, admin_port, front.directory)
        say_where(places, relay.workers_up, relay.workers, ready_file=ready)

    outcome = Supervisor(processes, started=started, close_listeners=layout.close_listeners).run()
    if not isinstance(outcome, Became):
        layout.remove_file()
        return outcome.code
    name_process("front" if outcome.role == FRONT else str(outcome.role))
    if outcome.role == FRONT:
        _become_front(outcome, config, layout, directory=directory)
    else:
        _become_relay(outcome, read, layout, directory=directory)
    return 0


def _become_front(
    became: Became, config: Config, layout: ProcessLayout, *, directory: str | None
) -> None:
    """Be the front, which alone serves an embedded directory; when it starts again, where the nodes
    know it."""
    place = None if directory is None else embedded_at(directory)
    url, served_at = None if place is None else directory, became.front.directory
    if place is not None and served_at is not None:
        host = f"[{place.host}]" if ":" in place.host else place.host
        url = f"{EMBEDDED}:{host}:{served_at.rpartition(':')[2]}"
    with opened(url, config.fleet_key, SystemClock()) as found:
        at = None if found is None else found.served_at
        uvloop.run(run_front(config, layout, became, served_at=at))


def _become_relay(
    became: Became, read: SettingsReader, layout: ProcessLayout, *, directory: str | None
) -> None:
    """Be a relay, with its part of the settings, now and when they are read again."""
    is_embedded = directory is not None and embedded_at(directory) is not None
    url = became.front.directory if is_embedded else directory

    def part_of(settings: ReadSettings) -> ReadSettings:
        config = config_of(settings.config, became.role, layout.processes)
        return replace(settings, config=config)

    async def serve(directory: OpenedDirectory | None) -> None:
        part = part_of(read.first)

        def reloading(gateway: Gateway) -> Reloading:
            return Reloading(gateway, part, lambda: part_of(read.again()))

        client = None if directory is None else directory.client
        await run_relay(part.config, client, layout, became=became, reloading=reloading)

    with opened(url, read.first.config.fleet_key, SystemClock()) as found:
        uvloop.run(serve(found))


def say_where(places: ServedAt, up: int, workers: int, *, ready_file: Path | None) -> None:
    """Say where we are; the ready file appears whole or not at all."""
    config, data_url, admin_port, served_at = places
    admin_url = web_address(config.admin_host, admin_port, config.admin_tls)
    where = [f"gateway {data_url}", f"admin {admin_url}"]
    where += [f"directory {served_at}"] if served_at else []
    click.echo("  ".join([*where, f"{up} of {workers} workers up"]))
    tell(logging.INFO, "started", data=data_url, admin=admin_url, policy=config.policy, up=up)
    if ready_file is not None:
        part = ready_file.with_name(ready_file.name + ".part")
        lines = [data_url, admin_url, *([served_at] if served_at else [])]
        part.write_text("".join(f"{line}\n" for line in lines))
        part.replace(ready_file)
