"""An arm's book counts what became of the turns of one arm, so that two arms can be compared.

A turn counts for the arm that its session is of, wherever it ran: `displaced` are those that ran at
the other arm's workers, since none of their own was left.
"""

from __future__ import annotations

from collections import Counter

from ownerserve.gateway.histograms import Histogram
from ownerserve.router.requests.body import Usage


class ArmBook:
    """A book has an arm's latencies, in seconds, the tokens that workers reported, and how its
    turns ended."""

    def __init__(self) -> None:
        self.first_byte_s = Histogram()
        self.duration_s = Histogram()
        self.ends: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.displaced = 0

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens by kind."""
        return {
            "prompt": self.prompt_tokens,
            "cached": self.cached_tokens,
            "output": self.output_tokens,
        }

    def finished(self, usage: Usage | None, *, first_byte_s: float, duration_s: float) -> None:
        """Count a turn whose answer came whole."""
        self.ends["finished"] += 1
        self.first_byte_s.observe(first_byte_s)
        self.duration_s.observe(duration_s)
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.output_tokens += usage.output_tokens
