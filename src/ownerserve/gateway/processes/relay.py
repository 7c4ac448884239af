"""A relay is one of the processes that answer clients: a whole gateway, for the sessions that are
at home there.

Owns the order of its start: the workers are asked, what the operator changed meanwhile is asked for
again, the door opens, mail is taken in. At its end whatever it reads it answers itself, since the
others may be gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from ownerserve.directory.port import Directory
from ownerserve.gateway.admin import admin_app
from ownerserve.gateway.config import Config
from ownerserve.gateway.histograms import Histogram
from ownerserve.gateway.http.bodies import keep_pages
from ownerserve.gateway.http.callers import Caller
from ownerserve.gateway.http.client import ClientConnection
from ownerserve.gateway.http.door import raise_descriptor_limit
from ownerserve.gateway.processes.asked import answer, called
from ownerserve.gateway.processes.homes import Homes
from ownerserve.gateway.processes.journal import AdminQuestion, ChangeJournal
from ownerserve.gateway.processes.layout import ProcessLayout
from ownerserve.gateway.processes.line import Line
from ownerserve.gateway.processes.mail import Parcel, ParcelKind, Post, Receiving
from ownerserve.gateway.processes.part import GatewayPart
from ownerserve.gateway.processes.supervisor import Became, Ready
from ownerserve.gateway.rollout.reloading import Reloading
from ownerserve.gateway.roster import LOOK_S
from ownerserve.gateway.service import Gateway
from ownerserve.kv.ids import WorkerId

log = logging.getLogger("ownerserve.gateway")

ABOUT = "/process"
"""What a relay says of itself to the front alone."""


def config_of(config: Config, process: int, processes: int) -> Config:
    """Return the settings of one relay: its part of what all may take together.

    Workers are listed from another one on in each relay: ties go by that order, and all relays
    would send their first session to the same worker.
    """
    seats, tenants, queue = config.seats, config.tenants, config.queue
    running, waiting = queue.running_max, queue.waiting_max
    shift = process * len(config.workers) // processes

    def part_of(caller: Caller) -> Caller:
        terms = caller.terms
        limits = {
            name: None if limit is None else limit / processes
            for name in ("requests_per_minute", "tokens_per_minute")
            for limit in (getattr(terms, name),)
        }
        return replace(caller, terms=replace(terms, **limits))

    return replace(
        config,
        workers=config.workers[shift:] + config.workers[:shift],
        bodies_max_bytes=config.bodies_max_bytes // processes,
        seats=None if seats is None else replace(seats, share=seats.share / processes),
        tenants=None if tenants is None else tenants.changed(part_of),
        queue=replace(
            queue,
            running_max=None if running is None else dealt(running, process, processes),
            waiting_max=None if waiting is None else dealt(waiting, process, processes),
        ),
    )


def dealt(limit: int, process: int, processes: int) -> int:
    """Return the part of one relay in a limit: all parts together are the limit, none more."""
    return limit // processes + (process < limit % processes)


async def run_relay(
    config: Config,
    directory: Directory | None,
    layout: ProcessLayout,
    *,
    became: Became,
    reloading: Callable[[Gateway], Reloading],
) -> None:
    """Serve as one relay until the supervisor says otherwise; `config` is its part of the settings
    (config_of), and `reloading` makes what reads them again."""
    raise_descriptor_limit()
    keep_pages()
    line, post = Line(became.line), Post(layout.mailboxes)
    homes = Homes(layout.table, became.role, layout.processes)
    part = GatewayPart(homes=homes, post=post, life=became.life)
    gateway = Gateway(config, directory, part)
    gateway.reloading = reloading(gateway)
    app = relay_app(gateway, part)
    answering = set[asyncio.Task[None]]()

    def take(parcel: Parcel) -> None:
        if parcel.kind is ParcelKind.QUESTION:
            task = asyncio.get_running_loop().create_task(answer(app, parcel))
            answering.add(task)
            task.add_done_callback(answering.discard)
            return
        client = socket.socket(fileno=parcel.descriptor)
        assert gateway.door is not None
        gateway.door.let_in(client, partial(ClientConnection, gateway, parcel.data))

    receiving = Receiving(layout.mailboxes[became.role], take)
    starting = asyncio.ensure_future(
        gateway.start(
            layout.keep_listener(became.role),
            prepare=lambda: redo(app, layout.journal.entries()),
        )
    )
    ending = asyncio.ensure_future(line.end.wait())
    await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        return
    await starting
    gc.freeze()  # what is here now stays: no collection need look at it again
    receiving.open()
    late = asyncio.create_task(redo_for_who_comes(app, layout.journal, gateway.roster.monitors))
    line.ready(Ready(workers_up=gateway.workers_up, workers=len(gateway.turns.pools)))
    await line.drain.wait()
    late.cancel()
    homes.keeps_all = True
    draining = asyncio.ensure_future(gateway.drain())
    await asyncio.wait((draining, ending), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await gateway.stop()
    receiving.close()
    post.close()


async def redo(app: ASGIApp, questions: Iterable[AdminQuestion]) -> None:
    """Ask for everything again that was changed while the gateway runs."""
    for question in questions:
        head, _ = await called(app, question)
        if head.status >= 500:
            log.warning("%s %s can't be done again", question.method, question.target)


async def redo_for_who_comes(
    app: ASGIApp, journal: ChangeJournal, here: Container[WorkerId]
) -> None:
    """Ask for what was changed of workers that were not `here` as all was asked for again, once
    each is: discovery may name them late."""
    named = {one.worker for one in journal.entries() if one.worker is not None}
    missed = {worker for worker in named if worker not in here}
    while missed:
        await asyncio.sleep(LOOK_S)
        for worker in [worker for worker in missed if worker in here]:
            missed.discard(worker)
            await redo(app, [one for one in journal.entries() if one.worker == worker])


def relay_app(gateway: Gateway, part: GatewayPart) -> ASGIApp:
    """Make the app that answers the front: the admin port's, and what a relay says of itself."""

    async def get_about(request: Request) -> Response:
        return Response(msgspec.json.encode(about(gateway, part)), media_type="application/json")

    return Starlette(routes=[Route(ABOUT, get_about), Mount("", admin_app(gateway))])


def about(gateway: Gateway, part: GatewayPart) -> dict[str, Any]:
    """Return what a relay says of itself, and what can't be put together from its other answers, as
    JSON values."""
    by_mode = gateway.turns.observer.by_mode.items()
    times = [(mode, one.first_byte_s, one.duration_s) for mode, one in by_mode]
    return {
        "process": part.homes.process,
        "life": part.life,
        "pid": os.getpid(),
        "age_s": round(gateway.now() - gateway.turns.observer.began_at_s, 3),
        "clients": len(gateway.clients),
        "live": gateway.state.live,
        "sessions": len(gateway.state.sessions),
        "at_home": part.homes.counts.here,
        "given_away": part.homes.counts.elsewhere,
        "parcels_waiting": part.post.waiting,
        "latency": [
            {"mode": mode, "first_byte": _counts(first_byte), "whole": _counts(whole)}
            for mode, first_byte, whole in times
        ],
    }


def _counts(histogram: Histogram) -> dict[str, Any]:
    return {"counts": histogram.counts, "sum": histogram.sum}
