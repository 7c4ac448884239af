"""Lenders are the two ways in which a node lends: what lies on its device, by the cache's tickets
(lending.py), and what lies below it (stored_looks.py), read into a stage (stored_lends.py). The
device comes first.

Whose a ticket is its number tells (FIRST_TICKET). The calls are `Lending`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import cast

import msgspec

from ownerserve.kv.wire.holders import LendingRank
from ownerserve.kv.wire.rpc import AskPrefix, PrefixIs, RpcAnswer
from ownerserve.node.transfers.lending import Lending, SessionHint, memory_of
from ownerserve.node.transfers.stored_lends import FIRST_TICKET, StoredLends
from ownerserve.node.transfers.stored_looks import StoredLooks, StoredPrefix
from ownerserve.transfer.control.events import LendNotOpened, LendOpened, OpenLend
from ownerserve.transfer.control.messages import NO_TURN, LendRefusal
from ownerserve.transfer.movers.peers import own_name
from ownerserve.transfer.vocabulary import FramePiece, Runs

OnEngine = Callable[[Callable[[], object]], "Future[object]"]
"""Runs a call on the engine's thread, between two steps. Raises RuntimeError once it has ended."""


def no_engine(work: Callable[[], object]) -> Future[object]:
    """Run nothing: there is no engine, or it has not started."""
    raise RuntimeError("the engine has not started")


class Lenders:
    """`Lenders` are one node's; `device` None: nothing on it is lent. `stored` None: nothing below
    it is; `looks` None: nor is it told. `ranks` gives who lends what is told, each its own part;
    none: this node, whole."""

    def __init__(self, device: Lending | None) -> None:
        self.device = device
        self.stored: StoredLends | None = None
        self.looks: StoredLooks | None = None
        self.ranks: Callable[[], tuple[LendingRank, ...]] = tuple
        self._process = own_name()

    def hear_revoked(self, hears: Callable[[int], None]) -> None:
        """Have `hears` called, on the engine's thread, with each ticket that a turn takes the room
        of."""
        if self.device is not None:
            self.device.room.revoked = hears

    # -- on the engine's thread ----------------------------------------------------------------

    def open(self, asked: OpenLend, hint: SessionHint, now: float) -> LendOpened | LendNotOpened:
        """Lend all that is wanted, from the device, or else from below; or nothing."""
        refused = LendNotOpened(asked.number, LendRefusal.NOT_HELD)
        opened = refused if self.device is None else self.device.open(asked, hint, now)
        if opened != refused or self.stored is None or asked.lend.turn_id != NO_TURN:
            return opened
        return self.stored.open(asked, hint)

    def touch(self, ticket: int) -> None:
        """Put off the ticket's end: somebody reads. One of the store is over when it is ended, and
        not before."""
        if ticket < FIRST_TICKET and self.device is not None:
            self.device.touch(ticket)

    def end(self, ticket: int) -> None:
        """End the ticket; one that is over is no error."""
        if ticket >= FIRST_TICKET and self.stored is not None:
            self.stored.end(ticket)
        elif self.device is not None:
            self.device.end(ticket)

    # -- on any thread -------------------------------------------------------------------------

    def prefix(self, asked: AskPrefix, on_engine: OnEngine) -> Future[RpcAnswer]:
        """Begin to find what of a session could be lent now; holds nothing."""
        answer: Future[RpcAnswer] = Future()
        answer.set_running_or_notify_cancel()

        def held(done: Future[object]) -> None:
            if (error := done.exception()) is not None:
                answer.set_exception(error)
                return
            on_device, behind = cast("tuple[PrefixIs, StoredPrefix | None]", done.result())
            if behind is None or self.looks is None:
                tell(on_device)
            else:
                self.looks.look(behind, on_device, told=tell)

        def tell(found: PrefixIs) -> None:
            ranks = self.ranks() if found.tokens else ()
            answer.set_result(msgspec.structs.replace(found, ranks=ranks))

        on_engine(lambda: self._prefix(asked)).add_done_callback(held)
        return answer

    def opened(self, ticket: int) -> None:
        """Take that the source side's control knows of the ticket."""
        if ticket >= FIRST_TICKET and self.stored is not None:
            self.stored.opened(ticket)

    def runs(self, ticket: int, piece: FramePiece) -> Runs | None:
        """Return where the piece lies; None: it is not lent under that ticket."""
        if ticket >= FIRST_TICKET:
            return None if self.stored is None else self.stored.runs(ticket, piece)
        return None if self.device is None else self.device.runs(ticket, piece)

    def stands(self, ticket: int) -> bool:
        """Tell whether the ticket stands; False before what it covers is used again."""
        if ticket >= FIRST_TICKET:
            return self.stored is not None and self.stored.stands(ticket)
        return self.device is not None and self.device.stands(ticket)

    def memory(self, ticket: int, ids: Iterable[bytes] | None = None) -> bytes:
        """Return where what the ticket covers lies, or those of `ids`, for a reader on this host;
        empty: nowhere."""
        if ticket >= FIRST_TICKET and self.stored is not None:
            lent, regions = self.stored.lent(ticket), self.stored.stage.regions
            return memory_of(self._process, regions, lent, ids, engines={})
        return b"" if self.device is None else self.device.memory(ticket, ids)

    @property
    def engines(self) -> Mapping[str, str]:
        """Return how engines that read the device are reached."""
        return {} if self.device is None else self.device.engines

    @property
    def boot(self) -> str:
        """Return the boot id of this host."""
        return self._process.boot

    def _prefix(self, asked: AskPrefix) -> tuple[PrefixIs, StoredPrefix | None]:
        held = PrefixIs(0) if self.device is None else self.device.prefix(asked)
        behind = None if self.looks is None else self.looks.behind(asked, held)
        if behind is not None and self.device is not None:
            # What is here may have been edited since the last copy: that one is of no use then.
            is_same = self.device.begins(asked, behind.records.tip.ends)
            behind = behind if is_same else None
        return held, behind
