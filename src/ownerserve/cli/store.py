"""`ownerserve store` looks into a store on disk, checks it, cleans it, empties it, measures it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ownerserve.cli.options import Finite
from ownerserve.cli.output import OutputFolder, console_for, json_option, write_json
from ownerserve.kv.durable import sync_directory
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.prefix import tenant_salt
from ownerserve.kv.units import KIB, MIB, format_bytes, parse_bytes
from ownerserve.node.storage.adopting import take_over
from ownerserve.store.disk.adopt import Adoption
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.maintain import QUARANTINE_KEPT_S, collect, verify_all
from ownerserve.store.disk.rotate import KeyChange, Rotated, replace_lost_key, rotate_key
from ownerserve.store.disk.snapshot import view_of
from ownerserve.store.disk.tier import DiskOptions, DiskTier, Index, StoreUnavailable
from ownerserve.store.format.seal import KEY_BYTES, Keys
from ownerserve.store.index.reader import IndexEntry, IndexFailed
from ownerserve.store.service.measure import DiskBench, Measured, measure_index
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.policy import KindLimits, TierLimits, split

DIRECTORY = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)

HOURS = Finite(0, 1e6)

key_option = click.option(
    "--key-file", type=FILE, metavar="FILE", help="Master key, 32 bytes. Default: DIR/KEY."
)


@click.group("store", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """The artifact store on disk (docs/store.md; its format: docs/format.md).

    `ls` and `verify` change nothing: they read beside a running worker, a dead worker's store, and
    one on a read-only mount. `gc`, `purge`, `rotate-key` and `adopt` write: stop the worker first.

    \b
    ownerserve store ls /var/lib/ownerserve
    ownerserve store verify /var/lib/ownerserve
    ownerserve store gc /var/lib/ownerserve --capacity 500GiB
    ownerserve store purge /var/lib/ownerserve --tenant acme --secret-file salt.key
    ownerserve store adopt /var/lib/ownerserve-dead /var/lib/ownerserve
    """


@command.command("ls", short_help="What is stored, of whom, and where.")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0, 1_000_000),
    default=20,
    show_default=True,
    help="Records shown.",
)
@click.option("--tenant", metavar="HEX", help="Only this tenant's records (64 hex digits).")
@json_option
def ls(directory: Path, limit: int, tenant: str | None, json_target: str | None) -> None:
    """List records, bytes by tenant and kind, segments and quarantine.

    \b
    ownerserve store ls DIR --limit 5
    ownerserve store ls DIR --json - | jq .usage
    """
    store = view_of(directory, keys=Keys())
    try:
        entries = list(islice(store.entries(_tag(tenant) if tenant else None), limit))
        usage = [
            {
                "tenant": owner.hex() or "shared",
                "kind": kind.name.lower(),
                "records": used.records,
                "stored_bytes": used.stored_bytes,
            }
            for (owner, kind), used in sorted(store.usage().items())
        ]
        segments = [msgspec.to_builtins(row) for row in store.segments()]
        bad = [
            {"id": item.id.hex(), "reason": item.reason, "at_s": item.at_ms / 1000}
            for item in store.quarantined()
        ]
    finally:
        store.close()
    records = [_describe(entry) for entry in entries]
    console = console_for(json_target)
    table = Table("tenant", "kind", "records", "bytes", title=escape(str(directory)))
    for row in usage:
        size = format_bytes(float(str(row["stored_bytes"])))
        table.add_row(str(row["tenant"])[:16], str(row["kind"]), str(row["records"]), size)
    console.print(table)
    table = Table("id", "kind", "component", "tokens", "bytes", "exactness", "segment")
    for item in records:
        size = format_bytes(float(str(item["stored_bytes"])))
        what = (str(item[key]) for key in ("kind", "component", "tokens"))
        table.add_row(
            str(item["id"])[:16], *what, size, str(item["exactness"]), str(item["segment"])
        )
    console.print(table)
    console.print(f"{len(segments)} segments, {len(bad)} records in quarantine")
    body = {"usage": usage, "records": records, "segments": segments, "quarantine": bad}
    write_json(json_target, "store.ls", body)


def _describe(entry: IndexEntry) -> dict[str, object]:
    meta = entry.meta
    return {
        "id": meta.id.hex(),
        "kind": meta.kind.name.lower(),
        "component": meta.component,
        "tokens": [meta.first_token, meta.end_token],
        "prefix_hash": meta.prefix_hash.hex(),
        "tenant": meta.tenant.hex() or "shared",
        "precision": meta.precision,
        "exactness": meta.exactness,
        "units": meta.units,
        "payload_bytes": entry.payload_bytes,
        "stored_bytes": entry.stored_bytes,
        "segment": entry.segment,
        "offset": entry.offset,
        "touched_s": entry.touched_ms / 1000,
        "reuse_count": entry.reuse_count,
        "restore_cost_ms": entry.restore_cost_ms,
    }


@command.command("verify", short_help="Read every record and check its digests.")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@key_option
@json_option
def verify(directory: Path, key_file: Path | None, json_target: str | None) -> None:
    """Read and verify all records; exit status 1 when one is bad.

    Nothing is changed: a running worker quarantines what it finds itself.

    \b
    ownerserve store verify DIR && echo sound
    """
    store = view_of(directory, key_file=key_file)
    counts: dict[str, int] = {"sound": 0}
    bad = []
    size = 0
    try:
        for entry, reason in verify_all(store.entries(), store.read):
            size += entry.stored_bytes
            counts[reason or "sound"] = counts.get(reason or "sound", 0) + 1
            if reason is not None:
                bad.append({"id": entry.meta.id.hex(), "reason": str(reason)})
        details = dict(store.bad)
    finally:
        store.close()
    console = console_for(json_target)
    table = Table(
        "outcome", "records", title=f"{escape(str(directory))}: {format_bytes(size)} read"
    )
    for name, count in counts.items():
        table.add_row(name, str(count))
    console.print(table)
    for item in bad[:20]:
        console.print(f"{item['id'][:16]}  {escape(item['reason'])}")
    body = {"read_bytes": size, "counts": counts, "bad": bad, "reasons": details}
    write_json(json_target, "store.verify", body)
    if bad:
        sys.exit(1)


@command.command("gc", short_help="Expire, shrink to a capacity, compact, forget quarantine.")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.option("--range-ttl", metavar="HOURS", type=HOURS, help="Expire range artifacts unused for.")
@click.option("--point-ttl", metavar="HOURS", type=HOURS, help="Expire point artifacts unused for.")
@click.option("--capacity", metavar="SIZE", help="Evict the least useful down to this size.")
@click.option(
    "--quarantine-ttl",
    metavar="HOURS",
    type=HOURS,
    default=QUARANTINE_KEPT_S / 3600,
    show_default=True,
    help="Erase quarantined records older than this.",
)
@click.option(
    "--rebuild-index", is_flag=True, help="Drop the index first and make it from the segments."
)
@key_option
@json_option
def gc(
    directory: Path,
    range_ttl: float | None,
    point_ttl: float | None,
    capacity: str | None,
    quarantine_ttl: float,
    rebuild_index: bool,  # noqa: FBT001  click passes flags like this
    key_file: Path | None,
    json_target: str | None,
) -> None:
    """Clean a store that no worker is using.

    \b
    ownerserve store gc DIR --range-ttl 72 --point-ttl 1
    ownerserve store gc DIR --capacity 500GiB
    """
    home = Home.open(directory)
    size = split(parse_bytes(capacity, field="--capacity")) if capacity is not None else TierLimits(
        KindLimits(1 << 62), KindLimits(1 << 62)
    )  # fmt: skip
    limits = TierLimits(
        KindLimits(size.range.capacity_bytes, range_ttl * 3600 if range_ttl is not None else None),
        KindLimits(size.point.capacity_bytes, point_ttl * 3600 if point_ttl is not None else None),
    )
    options = DiskOptions(
        limits=limits,
        segment_bytes=home.segment_bytes,
        key_file=key_file,
        index=Index.MADE_ANEW if rebuild_index else Index.KEPT,
    )
    tier = DiskTier(directory, WallClock(), options=options)
    try:
        expired = tier.expire()
        evicted = tier.shrink()
        done = collect(tier.core, BufferPool(), kept_s=quarantine_ttl * 3600)
        body = {
            "expired": expired,
            "evicted": evicted,
            **msgspec.to_builtins(done),
            "recovery": msgspec.to_builtins(tier.recovery),
            "stored_bytes": sum(used.stored_bytes for used in tier.usage().values()),
        }
    finally:
        tier.close()
    console = console_for(json_target)
    table = Table("step", "result", title=escape(str(directory)))
    for name, value in body.items():
        if name != "recovery":
            table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    write_json(json_target, "store.gc", body)


@command.command("purge", short_help="Remove everything of one tenant.")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.option(
    "--tenant", metavar="NAME|HEX", required=True, help="64 hex digits as `ls` shows, or a name."
)
@click.option(
    "--secret-file", type=FILE, metavar="FILE", help="The deployment's salt secret, for a name."
)
@key_option
@json_option
def purge(
    directory: Path,
    tenant: str,
    secret_file: Path | None,
    key_file: Path | None,
    json_target: str | None,
) -> None:
    """Erase a tenant's records from the segments and the index.

    Done when this returns: the bytes are punched out of the files, quarantined copies too.

    \b
    ownerserve store purge DIR --tenant 3f1c...e9
    ownerserve store purge DIR --tenant acme --secret-file salt.key
    """
    tag = _tag(tenant, secret_file)
    home = Home.open(directory)
    options = DiskOptions(segment_bytes=home.segment_bytes, key_file=key_file)
    tier = DiskTier(directory, WallClock(), options=options)
    try:
        gone = tier.purge(tag)
        failed = tier.core.counters["io_errors"]
    finally:
        tier.close()
    console_for(json_target).print(f"{gone} records of {tag.hex()[:16]} erased")
    write_json(json_target, "store.purge", {"tenant": tag.hex(), "records": gone})
    if failed:
        raise InvalidInput("store", "the medium failed during the purge", "run it again")


def _tag(text: str, secret_file: Path | None = None) -> bytes:
    if secret_file is not None:
        return tenant_salt(secret_file.read_bytes(), text)
    try:
        tag = bytes.fromhex(text)
    except ValueError:
        tag = b""
    if len(tag) != 32:
        raise InvalidInput(
            "--tenant", f"{text!r} is not 64 hex digits", "give --secret-file to use a name"
        )
    return tag


@command.command("new-key", short_help="Make a key file for those who share a medium.")
@click.argument("file", metavar="FILE", type=FILE)
def new_key(file: Path) -> None:
    """Write 32 random bytes to a new FILE that its owner alone may read (0600).

    Give the same file to every worker that shares a medium, as --remote-key-file.

    \b
    ownerserve store new-key /etc/ownerserve/medium.key
    """
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as made:
            made.write(os.urandom(KEY_BYTES))
            made.flush()
            os.fsync(made.fileno())
        sync_directory(file.absolute().parent)
    except OSError as error:
        raise InvalidInput("FILE", str(error), "name a new file in a folder of yours") from error


@command.command("rotate-key", short_help="Seal all tenants' records by a new key.")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@key_option
@click.option(
    "--new-key-file",
    type=FILE,
    metavar="FILE",
    help="The new key, 32 bytes. Default: one is made, DIR/KEY.",
)
@click.option(
    "--old-key-lost", is_flag=True, help="Erase all tenants' records, which nothing opens any more."
)
@json_option
def rotate_key_(
    directory: Path,
    key_file: Path | None,
    new_key_file: Path | None,
    old_key_lost: bool,  # noqa: FBT001  click passes flags like this
    json_target: str | None,
) -> None:
    """Give the store another key; stop the worker first.

    Each tenant's record is verified, sealed anew and written again; the old copy is punched out.
    Cut short at any point, nothing is lost: run the same command again.

    \b
    ownerserve store rotate-key DIR
    ownerserve store rotate-key DIR --key-file old.key --new-key-file new.key
    """
    console = console_for(json_target)

    def say(done: Rotated) -> None:
        seen = done.resealed + done.standing + done.unreadable
        size = format_bytes(done.resealed_bytes)
        console.print(f"{seen} of {done.records} records, {size} sealed anew")

    change = KeyChange(key_file, new_key_file)
    try:
        done = (
            replace_lost_key(directory, change)
            if old_key_lost
            else rotate_key(directory, change, clock=WallClock(), on_progress=say)
        )
    except (OSError, IndexFailed) as error:
        raise InvalidInput("store", str(error), "run the same command again") from error
    table = Table("step", "result", title=escape(str(directory)))
    for name, value in msgspec.to_builtins(done).items():
        table.add_row(name.replace("_", " "), escape(str(value)))
    console.print(table)
    write_json(json_target, "store.rotate-key", msgspec.to_builtins(done))


@command.command("adopt", short_help="Take a dead worker's store over into another one.")
@click.argument("source", metavar="FROM", type=DIRECTORY)
@click.argument("into", metavar="INTO", type=DIRECTORY)
@click.option(
    "--capacity", metavar="SIZE", default="80GiB", show_default=True, help="Most bytes in INTO."
)
@click.option("--key-file", type=FILE, metavar="FILE", help="FROM's master key. Default: FROM/KEY.")
@click.option(
    "--into-key-file", type=FILE, metavar="FILE", help="INTO's master key. Default: INTO/KEY."
)
@json_option
def adopt_(
    source: Path,
    into: Path,
    capacity: str,
    key_file: Path | None,
    into_key_file: Path | None,
    json_target: str | None,
) -> None:
    """Copy what a worker left, that does not come back, into another worker's store.

    A worker that is started again on FROM has all of it already: adopt only to make one store of
    two. Every record is verified; the newest go first, and push out what was touched before them
    where INTO is full. FROM loses nothing, and is marked: remove it afterwards. Cut short, run the
    same command again. The sessions that FROM knew are told by INTO's next worker to its gateways.

    Both are closed: stop INTO's worker, or have it do the same when it starts, by
    `ownerserve worker --store INTO --adopt FROM`.

    \b
    ownerserve store adopt /kv/worker-3 /kv/worker-1
    ownerserve store adopt /kv/worker-3 /kv/worker-1 --capacity 500GiB --key-file worker-3.key
    """
    limits = split(parse_bytes(capacity, field="--capacity"))
    limits = TierLimits(
        KindLimits(limits.range.capacity_bytes), KindLimits(limits.point.capacity_bytes)
    )
    options = DiskOptions(limits=limits, key_file=into_key_file)
    console = console_for(json_target)
    with progress_of(console, f"adopting {source}") as advance:
        try:
            done = take_over(source, into, options, key_file=key_file, on_progress=advance)
        except (OSError, IndexFailed, StoreUnavailable) as error:
            raise InvalidInput("store", str(error), "run the same command again") from error
    if done.was_done:
        console.print(f"{escape(str(into))} has adopted it before: nothing to do", highlight=False)
    else:
        table = Table("step", "result", title=escape(f"{source} into {into}"))
        for name, value in msgspec.to_builtins(done.records).items():
            table.add_row(name.replace("_", " "), str(value))
        table.add_row("sessions added", str(done.sessions_added))
        console.print(table)
        if not done.records.is_marked:
            console.print("FROM is read-only, so it bears no mark: adopt it into no other store")
    write_json(json_target, "store.adopt", msgspec.to_builtins(done))


@contextmanager
def progress_of(console: Console, what: str) -> Iterator[Callable[[Adoption], None]]:
    """Show how many of a store's records are dealt with, while the block runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(escape(what), total=None)

        def advance(done: Adoption) -> None:
            progress.update(task, total=done.records, completed=done.seen)

        yield advance


@command.command("bench", short_help="How fast a store is on this medium.")
@click.argument("directory", metavar="DIR", type=OutputFolder())
@click.option("--size", metavar="SIZE", default="256MiB", show_default=True, help="Bytes a round.")
@click.option(
    "--rounds",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="The median is shown.",
)
@json_option
def bench(directory: Path, size: str, rounds: int, json_target: str | None) -> None:
    """Measure durable writes and verified reads in a temporary store under DIR.

    Compare with `fio` and a file-per-artifact writer: benchmarks/store_bench.py.
    """
    total_bytes = parse_bytes(size, field="--size")
    directory.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="ownerserve-bench-", dir=directory))
    rows: list[Measured] = []
    try:
        for payload_bytes in (64 * KIB, MIB, 16 * MIB):
            measured = DiskBench(root / str(payload_bytes), payload_bytes, total_bytes)
            rows += measured.run(rounds)
            measured.tier.close()
            shutil.rmtree(root / str(payload_bytes))
        rows += measure_index(root, rows=min(20_000, total_bytes // KIB), rounds=rounds)
    finally:
        shutil.rmtree(root)
    table = Table(
        "metric", "median", "best", "unit", "CPU s", title=f"store on {escape(str(directory))}"
    )
    for row in rows:
        cells = (f"{row.value:,.4g}", f"{row.best:,.4g}", row.unit, f"{row.cpu_s:.2f}")
        table.add_row(row.metric, *cells)
    console_for(json_target).print(table)
    write_json(json_target, "store.bench", {"rows": [msgspec.to_builtins(row) for row in rows]})
