"""Links are shared by what moves over them, max-min fairly: networks and what stands behind them.

    stream((a, b), n, now)   a and b carry it at one rate | latency, which occupies nothing -> there
                             `- as many bytes a ms as its tightest link leaves it -'

A stream's rate is fair: it is no smaller than that of any other stream over its tightest link.
When a stream begins or ends the rates of all that share with it, however indirectly, are set anew;
in between nothing happens. What is alone moves as over the slowest of its links. Owns what is under
way, and at which rate. Must never know what the bytes are, or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.timeline.heap import Call, Heap, TimedCall
from ownerserve.sim.timeline.media import Duplex, Pipe


class Link:
    """A link is one direction of a medium that streams share. `moved_bytes` went over it; it is
    `factor` times as slow as its medium."""

    __slots__ = ("cut_until_s", "factor", "heap", "medium", "moved_bytes", "name", "streams")

    def __init__(self, name: str, medium: Medium, heap: Heap) -> None:
        self.name = name
        self.medium = medium
        self.heap = heap
        self.moved_bytes = 0
        self.factor = 1.0
        self.cut_until_s = 0.0
        self.streams: dict[Stream, None] = {}
        """What moves over it now, in the order in which it began."""

    @property
    def bytes_per_ms(self) -> float:
        """What moves over it at once in all."""
        return self.medium.bytes_per_ms / self.factor

    def starts_s(self, now_s: float) -> float:
        """Return when what was asked for before would be over, in seconds, had it all of the
        link."""
        waiting_s = self.waiting_bytes(now_s) / self.bytes_per_ms / 1e3
        return max(now_s + waiting_s, self.cut_until_s)

    def service_s(self, count: int) -> float:
        """Return how many seconds `count` bytes take that share with nobody."""
        return self.factor * self.medium.ms(count) / 1e3 if count else 0.0

    def waiting_bytes(self, now_s: float) -> int:
        """Return the bytes under way and not yet moved."""
        return sum(one.count - one.moved_bytes(now_s) for one in self.streams)

    def slow(self, factor: float) -> None:
        """Let everything move `factor` times as slowly from now on, what is under way too; 1 mends
        it. Raises InvalidInput for a factor that is not above 0."""
        if factor <= 0.0:
            raise InvalidInput("slow", f"a factor of {factor:g}", "use more than 0; 1 is as new")
        self.factor = factor
        share((self,), self.heap.now)

    def cut(self, until_s: float) -> None:
        """Let nothing begin before `until_s`: what is asked for waits, what is under way
        arrives."""
        self.cut_until_s = max(self.cut_until_s, until_s)


class Stream:
    """A stream is `count` bytes on their way over several links at once.

    `rate` is in bytes a ms, 0 before it begins; `ended_s` None until the last byte is there;
    `then(now)` is called at that instant, if it was set before.
    """

    __slots__ = (
        "_heap",
        "_left",
        "_since_s",
        "_timer",
        "count",
        "ended_s",
        "links",
        "rate",
        "then",
    )

    def __init__(self, links: tuple[Link, ...], count: int, now: float) -> None:
        self.links = links
        self.count = count
        self.rate = 0.0
        self.ended_s: float | None = None
        self.then: Call | None = None
        self._heap = links[0].heap
        self._left = float(count)
        self._since_s = now
        self._timer: TimedCall | None = None
        self._begin(now)

    def moved_bytes(self, now: float) -> int:
        """Return how many of its bytes have moved."""
        return self.count - round(self._left_at(now))

    def move_at(self, rate: float, now: float) -> None:
        """Go on at another rate."""
        if rate == self.rate:
            return
        self._left = self._left_at(now)
        self._since_s, self.rate = now, rate
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._heap.at(now + self._left / rate / 1e3, self._sent)

    def give_up(self, now: float) -> int:
        """End it where it is: nothing more is called. Returns how many bytes have moved."""
        if self._timer is not None:
            self._timer.cancel()
        moved = self.moved_bytes(now)
        self._leave(moved, now)
        return moved

    def _left_at(self, now: float) -> float:
        return max(0.0, self._left - self.rate * 1e3 * (now - self._since_s))

    def _begin(self, now: float) -> None:
        opens_s = max(link.cut_until_s for link in self.links)
        if opens_s > now:
            self._timer = self._heap.at(opens_s, self._begin)
            return
        self._since_s, self._timer = now, None
        for link in self.links:
            link.streams[self] = None
        share(self.links, now)

    def _sent(self, now: float) -> None:
        latency_ms = max(link.factor * link.medium.latency_ms for link in self.links)
        self._timer = self._heap.at(now + latency_ms / 1e3, self._arrived)
        self._leave(self.count, now)

    def _leave(self, moved: int, now: float) -> None:
        if self not in self.links[0].streams:
            return  # it has not begun, or all of it was sent
        self._left, self.rate = float(self.count - moved), 0.0
        for link in self.links:
            del link.streams[self]
            link.moved_bytes += moved
        share(self.links, now)

    def _arrived(self, now: float) -> None:
        self.ended_s = now
        if self.then is not None:
            self.then(now)


def stream(links: Iterable[Link], count: int, now: float) -> Stream:
    """Begin to move `count` bytes, 1 or more, over all of `links` at once."""
    return Stream(tuple(links), count, now)


def linked(name: str, medium: Medium, heap: Heap) -> Duplex[Link]:
    """Make a link that moves as much in both directions at once."""
    return Duplex(Link(f"{name}/out", medium, heap), Link(f"{name}/back", medium, heap))


def share(links: Iterable[Link], now: float) -> None:
    """Give what moves over `links`, and all that shares with that, its fair rate.

    The link that leaves least to each of its streams settles theirs; what they leave is for the
    others, and so on: the lowest rates are as high as can be, then the next ones.
    """
    reached = _reached(links)
    open_streams = {link: len(link.streams) for link in reached}
    room = {link: link.bytes_per_ms for link in reached}
    settled: set[Stream] = set()
    rate = 0.0
    while tight := [link for link in reached if open_streams[link]]:
        tightest = min(tight, key=lambda link: room[link] / open_streams[link])
        # Never less than the link before: of equal ones rounding may leave the next a little less.
        rate = max(rate, room[tightest] / open_streams[tightest])
        for one in tightest.streams:
            if one not in settled:
                settled.add(one)
                one.move_at(rate, now)
                for link in one.links:
                    room[link] -= rate
                    open_streams[link] -= 1


def _reached(links: Iterable[Link]) -> list[Link]:
    """Return the links, and those that any stream joins to them, each once."""
    reached = dict.fromkeys(links)
    waiting = list(reached)
    while waiting:
        for one in waiting.pop().streams:
            for link in one.links:
                if link not in reached:
                    reached[link] = None
                    waiting.append(link)
    return list(reached)


class Delivery(msgspec.Struct, frozen=True):
    """A delivery is there when what queues is, at `done_s`, and all of its streams have arrived."""

    done_s: float
    streams: tuple[Stream, ...] = ()

    def then(self, at: Callable[[float, Call], object], call: Call, now: float) -> None:
        """Have `at` call `call` when it is there."""
        coming = next((one for one in self.streams if one.ended_s is None), None)
        if coming is None:
            at(max(self.done_s, now), call)
        else:
            coming.then = partial(self.then, at, call)


Ways = Duplex[Pipe] | Duplex[Link]
"""Both directions of a medium of one's own, where what moves queues, or of one that is shared."""


def carry(way: Pipe | Link, count: int, now: float) -> Delivery:
    """Begin to move `count` bytes one way. Nothing takes no time."""
    if isinstance(way, Pipe):
        return Delivery(way.take(count, now))
    return Delivery(now, (stream((way,), count, now),) if count else ())
