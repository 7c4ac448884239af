"""`ownerserve directory` runs the ownership directory, looks at it, or has it filled again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

import click
import msgspec
from rich.table import Table

from ownerserve.cli.directory.holdings import (
    check_name,
    group_body,
    group_table,
    prefix_body,
    prefix_table,
    read_prefix,
    session_body,
    session_table,
    wished_body,
)
from ownerserve.cli.directory.rebuilding import rebuild
from ownerserve.cli.options import PORT, Finite, check_host, curve_key_option, fleet_key
from ownerserve.cli.output import OutputFile, OutputFolder, console_for, json_option, write_json
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.port import LEASE_S, Directory, DirectoryStatus
from ownerserve.directory.rpc.client import TIMEOUT_S, DirectoryClient, check_address, why_silent
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.errors import InvalidInput, PeerLost
from ownerserve.kv.listening import DIRECTORY, LOOPBACK
from ownerserve.kv.wire.curve import FleetKey, write_fleet_key

FORGET_S = 120.0
"""Forgetting a million records of a shared backend takes seconds."""

address_argument = click.argument("address", metavar="ADDRESS")


class SystemClock:
    """The clock tells seconds of this machine's life: leases don't jump when the wall clock is
    set."""

    def now(self) -> float:
        """Return the monotonic time of this machine, in seconds."""
        return time.monotonic()


@click.group("directory", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Who owns a session, who holds a prefix (docs/directory.md).

    \b
    ownerserve directory serve --home ./directory --port 7700 --new-fleet
    ownerserve directory serve --backend valkey://10.0.0.5:6379,10.0.0.6:6379 --min-replicas 1
    ownerserve directory status tcp://127.0.0.1:7700
    ownerserve directory rebuild tcp://127.0.0.1:7700

    \b
    ownerserve directory keys --out fleet.key
    ownerserve directory serve --host 10.0.0.5 --port 7700 --curve-key-file fleet.key
    ownerserve directory status curve://10.0.0.5:7700 --curve-key-file fleet.key
    """


@command.command("serve", short_help="Run the directory.")
@click.option(
    "--host",
    default=LOOPBACK,
    show_default=True,
    help="Address to listen on; off loopback it needs --curve-key-file.",
)
@click.option(
    "--port",
    type=PORT,
    default=DIRECTORY.port,
    show_default=True,
    help="Port; 0 takes a free one.",
)
@curve_key_option
@click.option(
    "--home",
    type=OutputFolder(),
    help="Where the term's high-water mark is kept. Without it workers raise the term.",
)
@click.option(
    "--backend",
    metavar="URL",
    help="valkey://[USER@]HOST:PORT[,HOST:PORT] or sentinel://HOST:PORT/NAME, valkeys:// or"
    " sentinels:// for TLS, ?password-file=FILE&ca-file=FILE behind it; default: this process.",
)
@click.option(
    "--lease",
    "lease_s",
    type=Finite(min=0, min_open=True),
    default=LEASE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long an owner owns without being heard.",
)
@click.option(
    "--min-replicas",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --backend: replicas that must have a change before it is told.",
)
@click.option(
    "--new-fleet",
    is_flag=True,
    help="No worker holds anything from before: open at once, not after one lease.",
)
@click.option(
    "--ready-file",
    type=OutputFile(),
    help="Written with the address when the port is open.",
)
def serve(
    host: str,
    port: int,
    curve_key_file: Path | None,
    home: Path | None,
    backend: str | None,
    lease_s: float,
    min_replicas: int,
    new_fleet: bool,  # noqa: FBT001 - a flag of the command line
    ready_file: Path | None,
) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    check_host(host)
    key = fleet_key(curve_key_file)
    if backend is None:
        opens_in_s = 0.0 if new_fleet else None
        directory: Directory = EmbeddedDirectory(
            SystemClock(), TermFile(home), lease_s=lease_s, opens_in_s=opens_in_s
        )
    else:
        directory = _shared(backend, lease_s, min_replicas)
    server = DirectoryServer(directory, host=host, port=port, key=key)
    server.start()
    click.echo(f"directory {server.address}  lease {lease_s:g} s  {backend or 'in this process'}")
    if ready_file is not None:
        part = ready_file.with_name(ready_file.name + ".part")
        part.write_text(server.address + "\n")
        part.replace(ready_file)
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    server.stop()


@command.command("status", short_help="Term, epochs, what is known.")
@address_argument
@click.option("--session", metavar="NAME", help="Also who owns this session, and where its tip is.")
@click.option(
    "--prefix",
    "prefixes",
    metavar="HEX",
    multiple=True,
    help="Also where this prefix is held; given several times, the first that is held at all.",
)
@click.option("--group", metavar="NAME", help="Also the hot prefixes of this group.")
@curve_key_option
@json_option
def status(
    address: str,
    curve_key_file: Path | None,
    session: str | None,
    prefixes: tuple[str, ...],
    group: str | None,
    json_target: str | None,
) -> None:
    """Ask a running directory.

    \b
    ownerserve directory status tcp://127.0.0.1:7700 --json - | jq .term
    ownerserve directory status tcp://127.0.0.1:7700 --group my-repository
    """
    wanted = tuple(read_prefix(prefix, field="--prefix") for prefix in prefixes)
    for field, name in (("--session", session), ("--group", group)):
        if name is not None:
            check_name(name, field=field)
    more: dict[str, Any] = {}
    tables: list[Table] = []
    with _asking(address, fleet_key(curve_key_file)) as client:
        found = client.status()
        if session is not None:
            more["session"] = session_body(client, session)
            tables.append(session_table(more["session"]))
        if wanted:
            more["prefix"] = prefix_body(client, *wanted)
            tables.append(prefix_table(more["prefix"]))
        if group is not None:
            more["group"] = group_body(client, group)
            tables.append(group_table(more["group"]))
    _report(found, "directory.status", json_target, more=more, tables=tables)


@command.command("replicate", short_help="Wish for a read-only copy of a prefix at a worker.")
@address_argument
@click.argument("prefix", metavar="PREFIX")
@click.option("--to", "place", required=True, metavar="WORKER", help="Its id, or WORKER/RANK.")
@curve_key_option
@json_option
def replicate(
    address: str, prefix: str, place: str, curve_key_file: Path | None, json_target: str | None
) -> None:
    """Write down that WORKER is to hold a read-only copy of PREFIX (64 hex digits, as `status
    --session` shows them). A gateway that knows the session has it copied from its owner, within
    10 s, where both workers lend and there is room. The wish is shown by `status --prefix`, and
    goes when the worker tells of a copy or its life ends.

    \b
    ownerserve directory replicate tcp://127.0.0.1:7700 PREFIX --to w1
    """
    wanted = read_prefix(prefix, field="PREFIX")
    with _asking(address, fleet_key(curve_key_file)) as client:
        body = wished_body(client, wanted, place)
    console_for(json_target).print(f"wished for at: {', '.join(body['wanted']) or 'nobody'}")
    write_json(json_target, "directory.replicate", body)


@command.command("rebuild", short_help="Forget all; workers fill it from their inventories.")
@address_argument
@click.option(
    "--wait",
    "wait_s",
    type=Finite(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait so long until it is filled and makes new owners again; 0 does not wait.",
)
@curve_key_option
@json_option
def rebuild_command(
    address: str, wait_s: float, curve_key_file: Path | None, json_target: str | None
) -> None:
    """Start a new term with empty memory. Safe at any time: no epoch repeats, and nobody loses a
    session whose lease runs; new sessions wait for one lease. Live workers tell what they own and
    hold as soon as they notice, at their next renewal."""
    key = fleet_key(curve_key_file)
    with _asking(address, key) as client:
        before = client.status()
    with _asking(address, key, timeout_s=FORGET_S) as client:
        console = console_for(json_target)
        found, rebuilt = rebuild(client, before, wait_s=wait_s, console=console)
    more = {"rebuilt": msgspec.to_builtins(rebuilt)}
    _report(found, "directory.rebuild", json_target, more=more)


@command.command("keys", short_help="Make a fleet's keys.")
@click.option(
    "--out",
    type=OutputFile(),
    required=True,
    metavar="FILE",
    help="A new file; its owner alone may read it (mode 0600).",
)
def keys(out: Path) -> None:
    """Draw the CURVE keys that a fleet's processes need to speak with each other off loopback: one
    file, the same for the directory, the workers and the gateways (--curve-key-file).

    Whoever has the file is of the fleet. To change the keys make a new file and start all anew.
    """
    write_fleet_key(out, field="--out")
    click.echo(f"keys in {out}")


@contextmanager
def _asking(
    address: str, key: FleetKey | None, *, timeout_s: float = TIMEOUT_S
) -> Iterator[DirectoryClient]:
    """Yield a client of the directory there. Raises InvalidInput when nobody answers."""
    check_address(address, key, field="ADDRESS")
    client = DirectoryClient(address, key=key, timeout_s=timeout_s)
    try:
        yield client
    except PeerLost as error:
        mend = "is `ownerserve directory serve` running there?"
        problem = f"{address}: {error}: {why_silent(address, key)}"
        raise InvalidInput("ADDRESS", problem, mend) from error
    finally:
        client.close()


def _shared(backend: str, lease_s: float, min_replicas: int) -> Directory:
    """Open a shared backend, imported only here: the client library is an extra. Raises
    InvalidInput without it."""
    try:
        from ownerserve.directory.valkey.directory import ValkeyDirectory, ValkeyOptions
        from ownerserve.directory.valkey.primary import BackendRefused
        from ownerserve.directory.valkey.source import parse_source
    except ImportError as error:
        mend = "pip install 'ownerserve[valkey]'"
        raise InvalidInput("--backend", f"needs a client library ({error})", mend) from error
    options = ValkeyOptions(lease_s=lease_s, min_replicas=min_replicas)
    directory = ValkeyDirectory(parse_source(backend), options)
    try:
        directory.reach()
    except BackendRefused as error:
        problem, _, mend = str(error).rpartition("; ")
        raise InvalidInput("--backend", problem, mend) from error
    except PeerLost as error:
        click.echo(f"warning: {error}: it is tried again with each request", err=True)
    return directory


def _report(
    found: DirectoryStatus,
    schema: str,
    json_target: str | None,
    *,
    more: Mapping[str, Any] = MappingProxyType({}),
    tables: Sequence[Table] = (),
) -> None:
    body = msgspec.to_builtins(found) | dict(more)
    term = found.term
    body["term"] = {"ordinal": term.ordinal, "nonce": term.nonce} if term else None
    table = Table(title="directory", title_justify="left", show_header=False)
    rows = {
        "backend": found.backend,
        "term": f"{term.ordinal} ({term.nonce:012x})" if term else "backend not reachable",
        "epochs issued in it": str(found.issued),
        "lease": f"{found.lease_s:g} s",
        "state": f"rebuilding, {found.opens_in_s:.1f} s left" if found.opens_in_s else "open",
    }
    if found.records is not None:
        rows |= {name: f"{number:,}" for name, number in msgspec.to_builtins(found.records).items()}
    elif found.keys is not None:
        rows["records"] = f"{found.keys:,}"
    rows["last copies lost"] = f"{found.lost_copies:,}"
    rows |= {f"asked: {name}": f"{number:,}" for name, number in sorted(found.asked.items())}
    for name, value in rows.items():
        table.add_row(name, value)
    for one in (table, *tables):
        console_for(json_target).print(one)
    write_json(json_target, schema, body)
