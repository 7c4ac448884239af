"""Faults are data: what breaks, when, for how long. They are written down, parsed, or drawn by a
seed.

    death:w3@600+120, slow_disk:w1@300+60x10, link:w2@100+30, directory@500+60, drawn:5@0+3600
    |     |  |   `- for 120 s            `- 10 times as slow
    kind  |  `- 600 s into the run
          `- the worker                     drawn: 5 faults in those 3600 s, by the seed

Performs nothing (injector.py does) and knows no fleet.
"""

from __future__ import annotations

import re
from enum import StrEnum
from math import inf, isfinite
from pathlib import Path
from random import Random

import msgspec

from ownerserve.kv.errors import InvalidInput

MEND = "write KIND[:wN]@START+SECONDS[xFACTOR],..., e.g. death:w3@600+120,slow_disk:w1@300+60x10"


class FaultKind(StrEnum):
    """A fault's kind says what breaks."""

    DEATH = "death"
    """A worker's process: what it ran and what its device and host memory held is gone, its disk
    stays; it comes back as a new incarnation."""
    SLOW_DISK = "slow_disk"
    """A worker's disk serves `factor` times as slowly."""
    LINK = "link"
    """A worker's NIC moves nothing; what is asked of it waits. What is under way arrives."""
    DIRECTORY = "directory"
    """The ownership directory: it answers nothing, and comes back under a new term, empty."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault begins `at_s` into the run and lasts `lasts_s` (inf: for good). `worker` is an index;
    the directory has none. `factor` is a slow disk's."""

    kind: FaultKind
    at_s: float
    lasts_s: float
    worker: int | None = None
    factor: float = 1.0


class Draw(msgspec.Struct, frozen=True):
    """A draw wishes for `count` faults of the `kinds` that begin in [from_s, from_s + spread_s)."""

    count: int
    from_s: float
    spread_s: float
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)


def check(faults: tuple[Fault, ...], *, workers: int, disks: int) -> None:
    """Raise InvalidInput naming the first fault that a fleet of so many workers, of which `disks`
    have a disk, can't have."""
    for fault in faults:
        told = f"{fault.kind} at {fault.at_s:g} s"
        if not (isfinite(fault.at_s) and fault.at_s >= 0 and fault.lasts_s > 0):
            raise InvalidInput("faults", f"{told} lasts {fault.lasts_s:g} s", MEND)
        if fault.kind is FaultKind.DIRECTORY:
            if fault.worker is not None:
                raise InvalidInput("faults", f"{told} names a worker", "leave it out")
        elif fault.worker is None or not 0 <= fault.worker < workers:
            raise InvalidInput("faults", f"{told} names no worker", f"use w0 to w{workers - 1}")
        if fault.kind is FaultKind.SLOW_DISK and not disks:
            raise InvalidInput("faults", f"{told}: there is no disk", "give the workers one")
        if not 0 < fault.factor < inf:
            raise InvalidInput("faults", f"{told} has a factor of {fault.factor:g}", "use 1 to 1e6")


def draw(wish: Draw, *, workers: int, seed: int) -> tuple[Fault, ...]:
    """Draw the faults, in order of their beginning: the same seed gives the same ones. Each lasts
    10 to 100 s."""
    random = Random(seed)
    found = []
    for _ in range(wish.count):
        kind = random.choice(wish.kinds)
        at_s = wish.from_s + random.random() * wish.spread_s
        lasts_s = random.uniform(10.0, 100.0)
        worker = None if kind is FaultKind.DIRECTORY else random.randrange(workers)
        factor = random.uniform(2.0, 50.0) if kind is FaultKind.SLOW_DISK else 1.0
        found.append(Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, worker=worker, factor=factor))
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def read_faults(text: str, *, workers: int, disks: int, seed: int) -> tuple[Fault, ...]:
    """Read faults from a specification as above, or from a JSON file with a list of Fault.

    Raises InvalidInput naming what can't be read.
    """
    path = Path(text)
    if path.suffix == ".json":
        try:
            faults = msgspec.json.decode(path.read_bytes(), type=tuple[Fault, ...])
        except (msgspec.MsgspecError, OSError) as error:
            raise InvalidInput("--faults", f"{text}: {error}", "pass a list of faults") from error
    else:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        faults = tuple(
            fault for part in parts for fault in _read(part, workers, disks=disks, seed=seed)
        )
    check(faults, workers=workers, disks=disks)
    return faults


_FORM = re.compile(
    r"(?P<kind>[a-z_]+)(:(?P<who>w?\d+))?@(?P<at>[\d.]+)\+(?P<lasts>[\d.]+|inf)(x(?P<factor>[\d.]+))?"
)


def _read(text: str, workers: int, *, disks: int, seed: int) -> tuple[Fault, ...]:
    match = _FORM.fullmatch(text)
    if match is None:
        raise InvalidInput("--faults", f"{text!r} can't be read", MEND)
    kind, who, at, lasts, factor = match.group("kind", "who", "at", "lasts", "factor")
    try:
        at_s, lasts_s, times = float(at), float(lasts), float(factor or 1.0)
    except ValueError as error:
        raise InvalidInput("--faults", f"{text!r} has a number that is none", MEND) from error
    if kind == "drawn" and who is not None and who.isdigit():
        kinds = tuple(k for k in FaultKind if disks or k is not FaultKind.SLOW_DISK)
        return draw(Draw(int(who), at_s, lasts_s, kinds), workers=workers, seed=seed)
    if kind not in list(FaultKind):
        known = ", ".join((*FaultKind, "drawn:COUNT"))
        raise InvalidInput("--faults", f"{kind!r} in {text!r}", f"use one of {known}")
    worker = None if who is None else int(who.removeprefix("w"))
    fault = Fault(kind=FaultKind(kind), at_s=at_s, lasts_s=lasts_s, worker=worker, factor=times)
    return (fault,)
