"""Members decide who joins and who leaves, by what the sources of workers say together.

    no source names it ──named──> ours ──no source names it any more──> leaves
                                   │ not ready / ready: no new turn / turns again

A worker that its operator lists is never taken out here. One that is listed no more stays as long
as a source names it.
One of ours that an operator told to leave stays away while a source goes on to name it. Who says
nothing (a source that fails) has still said what it said last: a failure removes nobody.

Owns what each source said last, and who came by a source. It does nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from ownerserve.gateway.http.access import Address
from ownerserve.gateway.roster import Stay
from ownerserve.kv.ids import WorkerId


class Member(msgspec.Struct, frozen=True):
    """A member is a worker that a source names. `is_ready`: the source says that it may have new
    turns."""

    address: Address
    is_ready: bool = True


class Join(msgspec.Struct, frozen=True):
    """The worker is to be taken in, with new turns or without."""

    member: Member
    by: str


class Leave(msgspec.Struct, frozen=True):
    """The worker is to leave: no source names it any more."""

    worker: WorkerId


class Hold(msgspec.Struct, frozen=True):
    """The worker is to get no new turn: its sources say that it is not ready."""

    worker: WorkerId


class Resume(msgspec.Struct, frozen=True):
    """The worker is to get turns again."""

    worker: WorkerId


Change = Join | Leave | Hold | Resume


class Members:
    """The members of one gateway's fleet, as its sources name them."""

    def __init__(self) -> None:
        self._said: dict[str, dict[WorkerId, Member]] = {}
        self._ours: dict[WorkerId, Member] = {}
        """Workers that came by a source, as the roster was told last."""
        self._others: set[WorkerId] = set()
        """Workers that a source names and their operator lists."""

    def named_by(self, source: str) -> int:
        """Return how many workers a source names."""
        return len(self._said.get(source, ()))

    def heard(
        self, source: str, members: Sequence[Member], *, here: Mapping[WorkerId, Stay]
    ) -> list[Change]:
        """Take in all that a source names now, and return what is to be changed at a roster that
        has the workers `here`."""
        self._said[source] = {one.address.worker: one for one in members}
        return self.look(here)

    def look(self, here: Mapping[WorkerId, Stay]) -> list[Change]:
        """Return what is to be changed, as it could not be before: whoever was leaving is gone."""
        wanted = self._wanted()
        changes: list[Change] = [
            Leave(worker)
            for worker in self._ours.keys() - wanted.keys()
            if here.get(worker, Stay.LEAVING) is not Stay.LEAVING
        ]
        self._ours = {worker: one for worker, one in self._ours.items() if worker in wanted}
        self._others &= wanted.keys()
        for worker, (by, member) in wanted.items():
            change = self._change(worker, member, by=by, stay=here.get(worker))
            if change is not None:
                changes.append(change)
        return changes

    def listed(self, worker: WorkerId) -> None:
        """Hear that its operator lists the worker: no source's word takes it out from now on."""
        if self._ours.pop(worker, None) is not None:
            self._others.add(worker)

    def unlisted(self, worker: WorkerId) -> bool:
        """Hear that its operator lists a worker no more that is here, and return whether it stays:
        a source names it, and is who takes it out from now on."""
        if worker not in self._others:
            return False
        self._others.discard(worker)
        _, member = self._wanted()[worker]
        self._ours[worker] = replace(member, is_ready=True)  # as the roster has it
        return True

    def _change(
        self, worker: WorkerId, member: Member, *, by: str, stay: Stay | None
    ) -> Change | None:
        before = self._ours.get(worker)
        if before is not None:
            if stay in (None, Stay.LEAVING) or before.is_ready is member.is_ready:
                return None
            self._ours[worker] = member
            return Resume(worker) if member.is_ready else Hold(worker)
        if worker in self._others or stay is Stay.LEAVING:  # the latter is looked at again
            return None
        if stay is not None:
            self._others.add(worker)
            return None
        self._ours[worker] = member
        return Join(member, by)

    def _wanted(self) -> dict[WorkerId, tuple[str, Member]]:
        """Return whom any source names, by the first that does; ready if one says so."""
        wanted: dict[WorkerId, tuple[str, Member]] = {}
        for source, members in self._said.items():
            for worker, member in members.items():
                known = wanted.get(worker)
                if known is None or (member.is_ready and not known[1].is_ready):
                    wanted[worker] = (source if known is None else known[0], member)
        return wanted
