"""A live session is one while it runs: its progress, and the prompts of its turns.

Owns the progress of one session. Made when its first turn is released, dropped when its last one
is done, so memory follows the sessions that run and not the trace.
"""

from __future__ import annotations

from typing import NamedTuple

from ownerserve.kv.ids import SessionId
from ownerserve.sim.timeline.turns import UNIT_BYTES
from ownerserve.sim.workload.course import Course
from ownerserve.sim.workload.shape import OutputReuse
from ownerserve.sim.workload.unit_ids import SessionIds
from ownerserve.trace.runs import common_prefix


class Fork(NamedTuple):
    """A fork names the parent whose beginning a conversation shares, and how much of it."""

    parent: SessionId
    shared_tokens: int


class LiveSession:
    """A live session is session `number` of the run."""

    __slots__ = ("_ids", "_missing", "_number", "course", "undone")

    def __init__(self, number: int, course: Course, ids: SessionIds) -> None:
        self._number = number
        self._ids = ids
        self._missing = [len(waits) for waits in course.waits]
        self.course = course
        self.undone = len(course.requests)
        """Turns not finished yet."""

    def finish(self, position: int) -> list[int]:
        """Count a turn as done; return the positions that waited for nothing but it."""
        missing = self._missing
        assert missing[position] >= 0, f"s{self._number}: turn {position} finished twice"
        missing[position] = -1
        self.undone -= 1
        freed = []
        for follower in self.course.followers[position]:
            missing[follower] -= 1
            if not missing[follower]:
                freed.append(follower)
        return freed

    def name(self, position: int) -> SessionId:
        """Return the conversation that a turn belongs to."""
        return self._name(self.course.requests[position].agent)

    def _name(self, agent: int) -> SessionId:
        return SessionId(f"s{self._number}/a{agent}" if agent else f"s{self._number}")

    def fork(self, position: int, unit_tokens: int) -> Fork | None:
        """Return what the first turn of a conversation shares with the one that it shares most
        with.

        Compared with the latest earlier turn of every other agent. None on later turns, and
        where nothing is shared.
        """
        if position not in self.course.openings:
            return None
        requests = self.course.requests
        request = requests[position]
        latest = {earlier.agent: earlier for earlier in requests[:position]}
        best: Fork | None = None
        for agent, earlier in sorted(latest.items()):
            units = common_prefix(request.runs, earlier.runs)
            both = min(units * unit_tokens, request.input_tokens, earlier.input_tokens)
            if both > (best.shared_tokens if best else 0):
                best = Fork(self._name(agent), both)
        return best

    def content(self, position: int, reuse: OutputReuse) -> tuple[bytes, bytes]:
        """Return the packed units of a turn: of its prompt, and of what it decodes.

            prompt   | full units | partial |
            next     | full units | the tail of the prompt and the answer's begin | answer ...

        The answer's ids, and that of a partial unit which it fills, are the next prompt's where
        that goes on from all full units of this one; else fresh. A partial unit that is not
        filled keeps the id that was recorded for it, if one was.
        """
        course = self.course
        full, units, end = course.spans[position]
        prompt = self._ids.pack(course.requests[position].runs, 0, units)
        output = b""
        if reuse == "next_prompt" and 0 < full < end:
            last_full = prompt[UNIT_BYTES * (full - 1) : UNIT_BYTES * full]
            output = self._onward(position, last_full)
            if output and full < units:
                prompt = prompt[: UNIT_BYTES * full] + output[:UNIT_BYTES]
                output = output[UNIT_BYTES:]
        fresh = self._ids.fresh + course.fresh[position]
        lacking = units - len(prompt) // UNIT_BYTES
        if lacking:
            prompt += self._ids.table.pack(((fresh, lacking),))
        lacking_decoded = end - units - len(output) // UNIT_BYTES
        if lacking_decoded > 0:
            output += self._ids.table.pack(((fresh + lacking, lacking_decoded),))
        return prompt, output

    def _onward(self, position: int, last_full: bytes) -> bytes:
        """Return the ids that the next prompt shows for the units which become full while decoding.

        None where it does not go on from this prompt, whose last full unit is `last_full`.
        """
        course = self.course
        following = course.following[position]
        if not following:
            return b""
        full, _, end = course.spans[position]
        until = min(end, course.spans[following].full)
        upcoming = self._ids.pack(course.requests[following].runs, full - 1, until)
        # Ids are chained: prompts with this unit in common have all before it in common.
        return upcoming[UNIT_BYTES:] if upcoming[:UNIT_BYTES] == last_full else b""
