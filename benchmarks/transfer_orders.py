"""Equal layouts: a piece read in the frame's order, and in raw order, where both sides' blocks are
alike.

    python benchmarks/transfer_orders.py [--rounds N] [--only WORD]

What lends and what brings are an hf worker's pools of each family and the landing of a bring; pools
of whole slots at the shapes that users run; and, of engines of which none lends, pools that keep
keys beside values, into another such pool. Pieces are cut as control cuts them (1 MiB), blocks lie
scattered; descriptors are both sides' runs and their cut, copies are the `shm` mover's. CPU time of
the thread, for each MiB, medians. In each round both orders take turns, and memcpy of as much.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.frame import DENSE, MLA, PayloadPart, PayloadSection
from ownerserve.kv.units import MIB
from ownerserve.node.transfers.landing import frame_region
from ownerserve.transfer.control.pieces import SizedPiece, cut
from ownerserve.transfer.layout.arrays import Pool
from ownerserve.transfer.layout.known import LAYOUTS
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.movers import cuts
from ownerserve.transfer.vocabulary import FramePiece
from result import Row, report, smaller_is_better

_move = ctypes.PyDLL(None).memmove
_move.argtypes, _move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
_move_long = ctypes.CDLL(None).memmove
_move_long.argtypes, _move_long.restype = _move.argtypes, None
LONG = 64 << 10
HF_BYTES = 8 * MIB


class Case(NamedTuple):
    name: str
    source: RegionPlaces
    goal: RegionPlaces
    ids: list[NDArray[np.int64]]
    own: list[NDArray[np.int64]]
    units: int
    memory: list[object]

    @property
    def bytes(self) -> int:
        return self.units * self.source.region.section.payload_bytes

    def pieces(self, form: bytes) -> list[FramePiece]:
        layers = self.source.region.section.layers
        whole = FramePiece(b"", 0, self.units, 0, layers, form=form)
        alike = {part.shape[0] for part in self.source.region.section.parts}
        return list(cut(SizedPiece(whole, self.bytes))) if len(alike) == 1 else [whole]

    def descriptors(self, pieces: list[FramePiece]) -> list[cuts.Cuts]:
        found = []
        for piece in pieces:
            goal, source = self.goal.runs(piece, self.own), self.source.runs(piece, self.ids)
            one = cuts.cut(goal, source, chunk_bytes=MIB)
            assert isinstance(one, cuts.Cuts)
            found.append(one)
        return found


def copy(found: list[cuts.Cuts]) -> None:
    for one in found:
        move = _move_long if one.goals[:, 1].mean() >= LONG else _move
        goals, sources = one.goals[:, 0].tolist(), one.sources[:, 0].tolist()
        for goal, source, size in zip(goals, sources, one.goals[:, 1].tolist(), strict=True):
            move(goal, source, size)


def scattered(count: int, of: int) -> list[NDArray[np.int64]]:
    ids = list(range(of))
    random.Random(3).shuffle(ids)
    return [np.array(ids[:count], np.int64)]


def landing(section: PayloadSection, units: int) -> tuple[RegionPlaces, NDArray[np.uint8]]:
    memory = np.zeros(units * section.unit_bytes, np.uint8)
    return RegionPlaces(frame_region(section, memory.ctypes.data, units)), memory


def hf_cases() -> Iterator[Case]:
    from ownerserve.engines.hf.model.runner import ModelRunner
    from ownerserve.engines.hf.model.tiny import TINY_MODELS, random_model, tiny_config
    from ownerserve.engines.hf.node.port import HfPort

    for family in sorted(TINY_MODELS):
        runner = ModelRunner(random_model(tiny_config(family)))
        runner.allocate({one.name: 4096 for one in runner.layout.components}, 1)
        port = HfPort(runner)
        for region in port.regions():
            units = max(1, min(2048, HF_BYTES // region.section.payload_bytes))
            goal, memory = landing(region.section, units)
            yield Case(
                f"hf {family}, {region.section.name}",
                RegionPlaces(region),
                goal,
                scattered(units, region.blocks),
                [np.arange(units)],
                units,
                [runner, memory],
            )


def attention(layers: int, heads: int) -> PayloadSection:
    shape = (layers, 32, heads, 128)
    parts = tuple(PayloadPart(name, shape, "bfloat16") for name in ("keys", "values"))
    return PayloadSection(DENSE, parts)


QWEN = "Qwen3-30B-A3B", attention(48, 4), 16, 1_024
SHARD = "70B, TP8 shard", attention(80, 1), 16, 2_048
LATENT = PayloadSection(MLA, (PayloadPart("latent", (61, 64, 576), "bfloat16"),))
MLA_ = "MLA, 61 layers", LATENT, 64, 1_024


def pool_cases() -> Iterator[Case]:
    for shape, layouts in (
        (QWEN, ("slots", "split", "combined", "interleaved", "headwise")),
        (SHARD, ("slots", "split", "combined", "interleaved", "headwise")),
        (MLA_, ("slots", "paged_rows")),
    ):
        name, section, block, tokens = shape
        for layout in layouts:
            rows = section.parts[0].shape[1]
            units, each = tokens // rows, 1 if layout == "slots" else rows // block
            sides, kept = [], list[object]()
            for _ in range(2):
                pool = Pool(section, 2 * units * each, block, 0)
                memory = np.ones(LAYOUTS[layout](pool).bytes, np.uint8)
                kept.append(memory)
                pool = msgspec.structs.replace(pool, address=memory.ctypes.data)
                sides.append(RegionPlaces(LAYOUTS[layout](pool)))
            ids = scattered(units * each, 2 * units * each)
            own = [ids[0][::-1].copy()]
            yield Case(f"{name}, {layout} to {layout}", *sides, ids, own, units, kept)


def measured(case: Case, rounds: int) -> list[Row]:
    form = case.source.form
    if form != case.goal.form:
        print(f"{case.name}: other forms", file=sys.stderr)
        return []
    orders = {"frame": case.pieces(b""), "raw": case.pieces(form)}
    mib = case.bytes / MIB
    plain = np.ones((2, case.bytes), np.uint8)
    spent: dict[str, list[tuple[float, float]]] = {}
    found = {order: case.descriptors(pieces) for order, pieces in orders.items()}
    counts = {order: sum(len(one.goals) for one in each) for order, each in found.items()}
    same = all(
        np.array_equal(one.goals, other.goals) and np.array_equal(one.sources, other.sources)
        for one, other in zip(found["frame"], found["raw"], strict=True)
    )
    copies = []
    for number in range(rounds + 1):  # the first one makes templates and maps memory
        began = time.thread_time()
        ctypes.memmove(plain[0].ctypes.data, plain[1].ctypes.data, case.bytes)
        copies.append(time.thread_time() - began)
        for order in sorted(orders, reverse=bool(number % 2)):
            began = time.thread_time()
            found = case.descriptors(orders[order])
            described = time.thread_time()
            copy(found)
            ended = time.thread_time()
            if number:
                spent.setdefault(order, []).append((described - began, ended - began))
    rows = []
    us = {
        order: [1e6 * statistics.median(column) / mib for column in zip(*times, strict=True)]
        for order, times in spent.items()
    }
    memcpy = 1e6 * statistics.median(copies) / mib
    print(
        f"{case.name}, {mib:.1f} MiB, {'the same' if same else 'other'} copies:"
        f" a MiB frame {counts['frame'] / mib:.1f},"
        f" raw {counts['raw'] / mib:.1f}; us a MiB, descriptors / all: frame"
        f" {us['frame'][0]:.0f} / {us['frame'][1]:.0f}, raw {us['raw'][0]:.0f} /"
        f" {us['raw'][1]:.0f}, memcpy {memcpy:.0f}",
        flush=True,
    )
    for part, at in (("descriptors", 0), ("descriptors and copies", 1)):
        rows.append(
            smaller_is_better(
                f"{case.name}: {part}, raw order",
                "us/MiB",
                us["raw"][at],
                other=us["frame"][at],
                other_name="the frame's order",
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    options = parser.parse_args()
    rows = list[Row]()
    for cases in (hf_cases, pool_cases):
        for case in cases():
            if options.only in case.name:
                rows += measured(case, options.rounds)
    report("transfer_orders", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
