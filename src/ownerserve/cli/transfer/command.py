"""`ownerserve transfer` says which roads KV can take from here, and how fast each is."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ownerserve.cli.options import PORT, check_host, curve_key_option, fleet_key
from ownerserve.cli.output import OutputFile, console_for, json_option, write_json
from ownerserve.cli.transfer.asking import ask_lender
from ownerserve.cli.transfer.benches import HERE, BenchReport, Measuring, run
from ownerserve.cli.transfer.pool import BenchPool, check_memory
from ownerserve.cli.transfer.roads import ENGINES, engine_road, local_roads, loopback_tcp, readable
from ownerserve.cli.transfer.shapes import LEAST_RUN_BYTES, QUICK, USUAL, parse_shape
from ownerserve.kv.addresses import parse_address
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import LOOPBACK, TRANSFER, Protection, check_reach
from ownerserve.kv.units import format_bytes, parse_bytes
from ownerserve.report.transfer_table import RoadState, show_roads, show_speeds
from ownerserve.transfer.movers.rights import permit_readers
from ownerserve.transfer.movers.tcp.handshake import TransferKey, transfer_key
from ownerserve.transfer.movers.tcp.server import TcpServer

LISTENER = msgspec.structs.replace(TRANSFER, host_option="--host", port_option="--port")
"""A worker's transfer port, by the options that it has here."""
LAST_PID = 1 << 22
ROUNDS, QUICK_ROUNDS = 5, 2

address_argument = click.argument("address", metavar="[HOST:PORT]", required=False)


@click.group("transfer", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """The roads by which KV moves between processes and hosts (docs/transfer.md).

    \b
    ownerserve transfer check                           what is open on this host
    ownerserve transfer check 10.0.0.7:7800 --curve-key-file fleet.key
    ownerserve transfer bench --quick                   how fast, beside memcpy

    \b
    Two hosts, on the first one:
      ownerserve transfer serve --host 10.0.0.7 --port 7800 --curve-key-file fleet.key
    and on the other:
      ownerserve transfer bench 10.0.0.7:7800 --curve-key-file fleet.key
    """


@command.command("check", short_help="Which roads are open from here, and the mend.")
@address_argument
@click.option(
    "--pid",
    type=click.IntRange(1, LAST_PID),
    metavar="PID",
    help="May this process's memory, say a worker's, be read from here (readv)?",
)
@curve_key_option
@json_option
def check(
    address: str | None, pid: int | None, curve_key_file: Path | None, json_target: str | None
) -> None:
    """Try each road: shared memory and reads by address with a process that is begun for it, TCP
    with HOST:PORT, which is a worker's transfer port or a `transfer serve`. Without HOST:PORT TCP
    is tried on loopback. Nothing of a worker's memory is read.

    \b
    ownerserve transfer check
    ownerserve transfer check 10.0.0.7:7800 --curve-key-file fleet.key
    ownerserve transfer check --pid 4711
    ownerserve transfer check --json - | jq '.roads[] | select(.state != "open")'

    Exit code 1: HOST:PORT or PID, where one is named, is not open to us.
    """
    place = None if address is None else _place(address)
    key = _transfer_key(curve_key_file)
    roads = local_roads()
    asked = []
    if pid is not None:
        asked.append(readable(pid))
        roads = [road for road in roads if road.road != asked[0].road] + asked
    if place is None:
        roads.append(loopback_tcp(key))
    else:
        asked.append(ask_lender(*place, key))
        roads.append(asked[-1])
    roads += map(engine_road, ENGINES)
    if json_target != "-":
        show_roads(roads, console_for(json_target))
    body = {"address": address, "pid": pid, "roads": list(map(msgspec.to_builtins, roads))}
    write_json(json_target, "transfer.check", body)
    if any(road.state is not RoadState.OPEN for road in asked):
        sys.exit(1)


@command.command("serve", short_help="Lend a test pool, for a bench from another host.")
@click.option(
    "--host",
    default=LOOPBACK,
    show_default=True,
    help="Address to listen on; off loopback it needs --curve-key-file.",
)
@click.option("--port", type=PORT, default=0, show_default=True, help="Port; 0 takes a free one.")
@curve_key_option
@click.option(
    "--size", metavar="SIZE", default="256MiB", show_default=True, help="Bytes of the pool."
)
@click.option(
    "--ready-file",
    type=OutputFile(),
    help="Written with the address when the port is open.",
)
def serve(
    host: str, port: int, curve_key_file: Path | None, size: str, ready_file: Path | None
) -> None:
    """Lend made-up bytes, and nothing else, until Ctrl-C or SIGTERM.

    \b
    ownerserve transfer serve --port 7800
    ownerserve transfer serve --host 10.0.0.7 --port 7800 --curve-key-file fleet.key --size 1GiB
    """
    check_host(host)
    key = _transfer_key(curve_key_file)
    check_reach(LISTENER, host, Protection.OPEN if key is None else Protection.KEYED)
    size_bytes = parse_bytes(size, field="--size")
    if size_bytes < LEAST_RUN_BYTES:
        raise InvalidInput("--size", f"{size_bytes} bytes", f"lend {LEAST_RUN_BYTES} or more")
    check_memory(size_bytes, field="--size")
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    permit_readers()
    server = _server(BenchPool(size_bytes), host, port, key=key)
    address = f"{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}"
    click.echo(f"test pool of {format_bytes(size_bytes)} at {address}")
    if ready_file is not None:
        part = ready_file.with_name(ready_file.name + ".part")
        part.write_text(address + "\n")
        part.replace(ready_file)
    stop.wait()
    server.close()


@command.command("bench", short_help="How fast each road is, beside memcpy.")
@address_argument
@click.option(
    "--size",
    "sizes",
    metavar="SIZE",
    multiple=True,
    help="Read this, as 16MiB or 1024x64KiB (runs that lie scattered); may be given again. Default:"
    f" {', '.join(map(str, USUAL))}.",
)
@click.option("--quick", is_flag=True, help=f"Only {', '.join(map(str, QUICK))}, in few rounds.")
@click.option(
    "--rounds",
    metavar="N",
    type=click.IntRange(1, 1000),
    help=f"The median is shown. Default: {ROUNDS}; with --quick {QUICK_ROUNDS}.",
)
@curve_key_option
@json_option
def bench(
    address: str | None,
    sizes: tuple[str, ...],
    quick: bool,  # noqa: FBT001 - a flag of the command line
    rounds: int | None,
    curve_key_file: Path | None,
    json_target: str | None,
) -> None:
    """Read a test pool by each road that is open, one read after another, each digested (xxh3) and
    checked. The pool is a child's of this process; with HOST:PORT that of a `transfer serve`, by
    TCP alone. CPU is that of both processes; with HOST:PORT, this side's.

    \b
    ownerserve transfer bench
    ownerserve transfer bench --size 64MiB --size 4096x16KiB --json bench.json
    ownerserve transfer bench 10.0.0.7:7800 --curve-key-file fleet.key

    Beside other movers, and plain TCP: `make bench-transfer`.
    """
    place = None if address is None else _place(address)
    key = _transfer_key(curve_key_file)
    shapes = [parse_shape(text, field="--size") for text in sizes] or (QUICK if quick else USUAL)
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    lender, round_trip_ms, closed = address or HERE, None, list[str]()
    with ExitStack() as closing:
        measuring = Measuring(shapes, rounds, closing)
        if place is None:
            bench_, closed = measuring.here(curve_key_file, key)
        else:
            bench_, round_trip_ms = measuring.there(*place, key)
        with _progress(bench_.steps) as advance:
            speeds = run(bench_, lender, advance)
    console = console_for(json_target)
    if json_target != "-":
        show_speeds(speeds, console)
        for road in closed:
            console.print(f"{road} is not open here: `ownerserve transfer check` says why")
        if round_trip_ms is not None:
            console.print(f"{round_trip_ms:.3g} ms a round trip to {lender}", markup=False)
    measured = BenchReport(lender, round_trip_ms, closed, speeds)
    write_json(json_target, "transfer.bench", {"rounds": rounds, **msgspec.to_builtins(measured)})


def _place(address: str) -> tuple[str, int]:
    return parse_address(address, field="HOST:PORT", mend="write it like 10.0.0.7:7800")


def _transfer_key(path: Path | None) -> TransferKey | None:
    key = fleet_key(path)
    return None if key is None else transfer_key(key)


def _server(pool: BenchPool, host: str, port: int, *, key: TransferKey | None) -> TcpServer:
    """Open the port. Raises InvalidInput that names the options as they are here."""
    try:
        return TcpServer(pool, host, port=port, key=key)
    except InvalidInput as error:
        field = error.field.replace(TRANSFER.host_option, LISTENER.host_option)
        field = field.replace(TRANSFER.port_option, LISTENER.port_option)
        raise InvalidInput(field, error.problem, error.mend) from error


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """Show on a terminal how far it is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task("reading", total=steps)
        yield lambda: shown.advance(task)
