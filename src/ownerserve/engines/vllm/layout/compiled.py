"""Copies in a host's memory by compiled loops, where Numba is at hand: vLLM brings it.

    rows    rows that lie in one piece on both sides, one after another
    turn    rows whose axes change places: a square of SIDE words goes through registers

What NumPy can't do: lines of a large copy are written past the processor's cache, so that what they
overwrite is not read first, and no list of rows is made. The loops let go of the interpreter's
lock. They are compiled once for a machine, in about a second, and kept beside this file or where
NUMBA_CACHE_DIR says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.extending import intrinsic

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.layout.copies import Offsets, Pieces
from ownerserve.kv.units import MIB

compat.hide_from_kernel_search("llvmlite.binding.ffi")  # it is here from now on

SIDE = 16
LINE_BYTES = 64
STREAMED_WORD = LINE_BYTES // SIDE
"""A row of a square of such words is a line."""
STREAMED_BYTES = 2 * MIB
"""From so many bytes on lines are written past the cache; what is smaller is soon read there."""

_I64, _I32 = ir.IntType(64), ir.IntType(32)
_Lower = Callable[..., Any]

# ---- what a loop is made of: addresses in, nothing out


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: Any) -> Any:
    value = builder.load(_at(builder, address, kind))
    value.align = 1
    return value


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _at(builder, address, value.type)).align = 1


def _stream(builder: Any, value: Any, address: Any) -> None:
    """Store a whole line, at a multiple of its length, past the cache."""
    store = builder.store(value, _at(builder, address, value.type))
    store.align = LINE_BYTES
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


def _line(builder: Any, goal: Any, source: Any) -> None:
    _stream(builder, _load(builder, source, ir.VectorType(_I64, LINE_BYTES // 8)), goal)


def _bytes(builder: Any, goal: Any, source: Any, count: Any) -> None:
    byte = ir.IntType(8)
    cgutils.raw_memcpy(builder, _at(builder, goal, byte), _at(builder, source, byte), count, 1)


def _fetch(builder: Any, source: Any) -> None:
    """Ask for a line that is to be read soon."""
    kind = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [kind, _I32, _I32, _I32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [kind], signature)
    hints = [ir.Constant(_I32, hint) for hint in (0, 2, 1)]  # to read, into L2, of data
    builder.call(prefetch, [_at(builder, source, ir.IntType(8)), *hints])


def _fence(builder: Any) -> None:
    """Let nobody see what comes after before what was streamed."""
    builder.fence("seq_cst")


def _square(bits: int, store: _Lower) -> _Lower:
    """Return what writes SIDE rows of SIDE words as columns: after the round with `half`, words
    whose places differ in that bit alone have changed places."""

    def lower(builder: Any, goal: Any, step: Any, source: Any, stride: Any) -> None:
        row = ir.VectorType(ir.IntType(bits), SIDE)
        rows = [
            _load(builder, builder.add(source, builder.mul(stride, ir.Constant(_I64, at))), row)
            for at in range(SIDE)
        ]
        for half in (1, 2, 4, 8):
            upper = [SIDE + (at ^ half) if at & half else at for at in range(SIDE)]
            under = [SIDE + at if at & half else at | half for at in range(SIDE)]
            for at in (at for at in range(SIDE) if not at & half):
                pair = rows[at], rows[at | half]
                for to, order in ((at, upper), (at | half, under)):
                    mask = ir.Constant(ir.VectorType(_I32, SIDE), order)
                    rows[to] = builder.shuffle_vector(*pair, mask)
        for at, value in enumerate(rows):
            store(builder, value, builder.add(goal, builder.mul(step, ir.Constant(_I64, at))))

    return lower


# Numba reads the names of what it calls from a signature.


def _of_one(lower: _Lower) -> Any:
    signature, generate = _typed(lower, 1)
    return intrinsic(lambda typing, source: (signature, generate))


def _of_two(lower: _Lower) -> Any:
    signature, generate = _typed(lower, 2)
    return intrinsic(lambda typing, goal, source: (signature, generate))


def _of_three(lower: _Lower) -> Any:
    signature, generate = _typed(lower, 3)
    return intrinsic(lambda typing, goal, source, count: (signature, generate))


def _of_four(lower: _Lower) -> Any:
    signature, generate = _typed(lower, 4)
    return intrinsic(lambda typing, goal, step, source, stride: (signature, generate))


def _of_none(lower: _Lower) -> Any:
    signature, generate = _typed(lower, 0)
    return intrinsic(lambda typing: (signature, generate))


def _typed(lower: _Lower, count: int) -> tuple[Any, _Lower]:
    """Return what Numba wants of something that is called with so many numbers and becomes what
    `lower` builds."""

    def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
        lower(builder, *given)
        return context.get_dummy_value()

    return types.void(*[types.int64] * count), generate


fence, fetch_line = _of_none(_fence), _of_one(_fetch)
stream_line, copy_bytes = _of_two(_line), _of_three(_bytes)
square_1, square_2, square_4 = (_of_four(_square(bits, _store)) for bits in (8, 16, 32))
stream_square = _of_four(_square(32, _stream))


# ---- the loops; their arguments have no names where they are called, since Numba knows none


def _rows(
    goals: Offsets,
    to: Offsets,
    sources: Offsets,
    at: Offsets,
    size: int,
    together: int,
    streams: int,
) -> None:
    """Copy rows of `size` bytes: of each piece from `sources` + `at` to `goals` + `to`; of so many
    pieces `together` the first row of each, then the second of each."""
    for first in range(0, goals.size, together):
        ahead = min(first + together, goals.size - together)
        for row in range(to.size):
            for piece in range(first, first + together):
                goal, source = goals[piece] + to[row], sources[piece] + at[row]
                for byte in range(0, size, LINE_BYTES):
                    fetch_line(sources[ahead + piece - first] + at[row] + byte)
                if streams:
                    for byte in range(0, size, LINE_BYTES):
                        stream_line(goal + byte, source + byte)
                else:
                    copy_bytes(goal, source, size)
    fence()


def _turn(
    goals: Offsets,
    to: Offsets,
    step: int,
    sources: Offsets,
    at: Offsets,
    stride: int,
    rows: int,
    columns: int,
    size: int,
    streams: int,
) -> None:
    """Write `rows` rows of `columns` words of `size` bytes, `stride` apart, as columns: each
    becomes a row of `rows` words, `step` apart. Of each piece, from `sources` + `at` to `goals` +
    `to`."""
    whole_rows, whole_columns = rows // SIDE * SIDE, columns // SIDE * SIDE
    if size != 1 and size != 2 and size != 4:
        whole_rows = whole_columns = 0
    for piece in range(goals.size):
        for place in range(to.size):
            goal, source = goals[piece] + to[place], sources[piece] + at[place]
            for column in range(0, whole_columns, SIDE):
                for row in range(0, whole_rows, SIDE):
                    there = goal + column * step + row * size
                    here = source + row * stride + column * size
                    if streams:
                        stream_square(there, step, here, stride)
                    elif size == 4:
                        square_4(there, step, here, stride)
                    elif size == 2:
                        square_2(there, step, here, stride)
                    else:
                        square_1(there, step, here, stride)
            for row in range(rows):
                first = whole_columns if row < whole_rows else 0
                for column in range(first, columns):
                    there = goal + column * step + row * size
                    copy_bytes(there, source + row * stride + column * size, size)
    fence()


def _compiled(signature: Any, loop: Callable[..., None]) -> Any:
    """Return the loop, compiled. Raises ImportError where Numba can't."""
    try:
        try:
            return njit(signature, nogil=True, cache=True)(loop)
        except (RuntimeError, OSError):  # there is nowhere to keep it, or no room
            return njit(signature, nogil=True)(loop)
    except NumbaError as error:
        raise ImportError(f"{loop.__name__} can't be compiled: {error}") from error


_LIST, _INT = types.int64[::1], types.int64
rows = _compiled(types.void(_LIST, _LIST, _LIST, _LIST, _INT, _INT, _INT), _rows)
turn = _compiled(types.void(_LIST, _LIST, _INT, _LIST, _LIST, *[_INT] * 5), _turn)


# ---- what is copied


class CompiledCopies:
    """`CompiledCopies` move pieces in a host's memory. Holds nothing; the memory behind the
    addresses has to live."""

    def gather(self, pieces: Pieces, frame: memoryview) -> None:
        """Copy the pieces out of the engine's memory into `frame`."""
        form, goals = pieces.form, _address(frame) + pieces.frame
        if (turned := form.turned) is not None:
            to, step, size = turned.frame, turned.line_bytes, form.lane.item_bytes
            streams = size == STREAMED_WORD and _streams(pieces, goals, to, step)
            from_memory = pieces.own, turned.own, turned.word_step
            turn(goals, to, step, *from_memory, turned.words, turned.lines, size, streams)
        else:
            own_rows, frame_rows, size = form.strips
            streams = _streams(pieces, goals, frame_rows, size)
            order = np.argsort(pieces.own)
            own = pieces.own[order]
            rows(goals[order], frame_rows, own, own_rows, size, _together(own, size), streams)

    def scatter(self, pieces: Pieces, frame: memoryview) -> None:
        """Copy the pieces from `frame` into the engine's memory."""
        form, sources = pieces.form, _address(frame) + pieces.frame
        if (turned := form.turned) is not None:
            to, step, size = turned.own, turned.word_step, form.lane.item_bytes
            streams = size == STREAMED_WORD and _streams(pieces, pieces.own, to, step)
            from_frame = sources, turned.frame, turned.line_bytes
            turn(pieces.own, to, step, *from_frame, turned.lines, turned.words, size, streams)
        else:
            own_rows, frame_rows, size = form.strips
            streams = _streams(pieces, pieces.own, own_rows, size)
            rows(pieces.own, own_rows, sources, frame_rows, size, 1, streams)

    def settle(self) -> None:
        """Return at once: calls of a host are over when they return."""


def _address(frame: memoryview) -> int:
    address, _ = np.frombuffer(frame, np.uint8).__array_interface__["data"]
    return int(address)


def _together(own: Offsets, size: int) -> int:
    """Return 2 where pieces come in pairs whose rows touch, such as keys and values of a token."""
    is_paired = len(own) % 2 == 0 and bool(np.all(own[1::2] - own[::2] == size))
    return 2 if is_paired else 1


def _streams(pieces: Pieces, goals: Offsets, to: Offsets, step: int) -> bool:
    """Return whether there is much to write, in whole lines that begin at their multiples."""
    if pieces.bytes < STREAMED_BYTES or step % LINE_BYTES:
        return False
    return not (np.bitwise_or.reduce(goals) | np.bitwise_or.reduce(to)) % LINE_BYTES
