"""This module shows what `ownerserve directory status` says of one session, one prefix or one
group."""

from __future__ import annotations

from typing import Any, TypeAlias

from rich.markup import escape
from rich.table import Table

from ownerserve.directory.messages import (
    DirectoryRefusal,
    FindGroup,
    FindSession,
    Found,
    GroupIs,
    Lookup,
    Outcome,
    Refused,
    ReplicateReadonly,
    Request,
    SessionIs,
    Wished,
)
from ownerserve.directory.port import Directory
from ownerserve.directory.rules import StateKind
from ownerserve.kv.errors import InvalidInput, PeerLost
from ownerserve.kv.ids import PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.store.format.model import ID_BYTES

RANK_DIGITS = 6
Body: TypeAlias = dict[str, Any]
"""A part of the command's JSON."""


def read_prefix(text: str, *, field: str) -> PrefixHash:
    """Read a prefix hash in hex. Raises InvalidInput naming `field`."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != ID_BYTES:
        raise InvalidInput(field, f"{text[:80]!r} is no prefix hash", "use 64 hex digits")
    return PrefixHash(found)


def check_name(text: str, *, field: str) -> None:
    """Refuse a session's or a group's name that no message can carry.

    Raises InvalidInput naming `field` for bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(field, f"{text[:80]!r} is no UTF-8", "give the name as it was") from None


def session_body(directory: Directory, name: str) -> Body | None:
    """Return what the directory says of the session: its owner and where its tip lies; None when it
    is not known."""
    found = _asked(directory, FindSession(SessionId(name)))
    if not isinstance(found, SessionIs):
        return None
    epoch = found.epoch
    tip = None if found.prefix_hash is None else prefix_body(directory, found.prefix_hash)
    return {
        "name": name,
        "owner": _unit(found.owner),
        "owner_live": found.owner_live,
        "epoch": {"term": epoch.term.ordinal, "counter": epoch.counter},
        "version": found.version,
        "tokens": found.tokens,
        "tip": tip,
    }


def prefix_body(directory: Directory, *candidates: PrefixHash) -> Body:
    """Return where living copies of the first prefix are that anybody holds, nearest tier first;
    of none, where nobody holds any."""
    found = _asked(directory, Lookup(candidates))
    if not isinstance(found, Found):
        return {"prefix_hash": candidates[0].hex(), "copies": []}
    return {
        "prefix_hash": found.prefix_hash.hex(),
        "tokens": found.tokens,
        "sessions": found.refs,
        "duty": None if found.owner is None else _unit(found.owner),
        "group": found.group,
        "wanted": [_unit(unit) for unit in found.wanted],
        "copies": [
            {
                "unit": None if unit is None else _unit(unit),
                "tier": tier.name.lower(),
                "kinds": [str(kind.name).lower() for kind in StateKind if kind & kinds],
            }
            for unit, tier, kinds in found.locations
        ],
    }


def wished_body(directory: Directory, prefix_hash: PrefixHash, place: str) -> Body:
    """Write the wish down that the unit at `place` (WORKER or WORKER/RANK) held a copy, and return
    the units that are wanted.

    Raises InvalidInput where nothing is known of the prefix, or nobody lives there.
    """
    worker, _, rank = place.partition("/")
    is_rank = not rank or (rank.isascii() and rank.isdigit() and len(rank) <= RANK_DIGITS)
    if not worker or not worker.isprintable() or not is_rank:
        raise InvalidInput("--to", f"{place[:80]!r} is no unit", "write WORKER, or WORKER/RANK")
    wish = ReplicateReadonly(prefix_hash, WorkerId(worker), int(rank or 0))
    (outcome,) = directory.execute([wish])
    match outcome:
        case Wished(wanted):
            return {"prefix_hash": prefix_hash.hex(), "wanted": [_unit(unit) for unit in wanted]}
        case Refused(DirectoryRefusal.UNKNOWN_PREFIX):
            mend = "use a hash that `directory status --session` or `--group` shows"
            raise InvalidInput("PREFIX", "the directory knows no such prefix", mend)
        case Refused(DirectoryRefusal.TARGET_NOT_LIVE):
            mend = "name a worker by its --worker-id, one that runs with --directory"
            raise InvalidInput("--to", f"{place!r} does not live", mend)
        case _:
            raise PeerLost(f"the directory answers {getattr(outcome, 'reason', outcome)}")


def group_body(directory: Directory, name: str) -> Body:
    """Return the group's prefixes, those first that most sessions came to stand on."""
    found = _asked(directory, FindGroup(name))
    members = found.members if isinstance(found, GroupIs) else ()
    return {
        "name": name,
        "members": [prefix_body(directory, member) | {"uses": uses} for member, uses in members],
    }


def session_table(body: Body | None) -> Table:
    """Make the table of a session's body, for people."""
    if body is None:
        return _table("session", [("it", "is not known")])
    owner = body["owner"] if body["owner_live"] else f"{body['owner']}, whose lease is over"
    rows = [
        ("owner", owner),
        ("epoch", f"{body['epoch']['counter']} of term {body['epoch']['term']}"),
        ("version", f"{body['version']:,}"),
        ("tokens", f"{body['tokens']:,}"),
    ]
    return _table(f"session {body['name']}", rows + _rows(body["tip"] or {}))


def prefix_table(body: Body) -> Table:
    """Make the table of a prefix's body, for people."""
    return _table("prefix", _rows(body) or [("it", "is held by nobody")])


def group_table(body: Body) -> Table:
    """Make the table of a group's body, for people."""
    table = Table(title=f"group {escape(body['name'])}", title_justify="left")
    for column in ("prefix", "uses", "tokens", "copies"):
        table.add_column(column)
    for one in body["members"]:
        tokens = f"{one['tokens']:,}" if "tokens" in one else "-"
        table.add_row(one["prefix_hash"], str(one["uses"]), tokens, str(len(one["copies"])))
    return table


def _rows(body: Body) -> list[tuple[str, str]]:
    if "tokens" not in body:
        return []
    return [
        ("tip", f"{body['prefix_hash']}, {body['tokens']:,} tokens"),
        ("stood on by", f"{body['sessions']:,} sessions"),
        ("last-copy duty", body["duty"] or "nobody's"),
        ("group", body["group"] or "none"),
        *(
            (copy["tier"], f"{copy['unit'] or 'all'}: {', '.join(copy['kinds'])}")
            for copy in body["copies"]
        ),
        *(("wished for at", unit) for unit in body["wanted"]),
    ]


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _unit(unit: RoutingUnit) -> str:
    return f"{unit.worker} rank {unit.dp_rank} life {unit.incarnation}"


def _asked(directory: Directory, request: Request) -> Outcome:
    """Ask the directory and return its outcome. Raises PeerLost where it does not answer now."""
    (outcome,) = directory.execute([request])
    if isinstance(outcome, Refused):
        raise PeerLost(f"the directory answers {outcome.reason}")
    return outcome
