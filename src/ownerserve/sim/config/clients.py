"""What a client does with a turn that was refused or does not begin: plain data, as OpenAI's and
Anthropic's own Python clients have it (openai 1.x: two retries, 0.5 s doubling up to 8 s, up to a
quarter less by chance, Retry-After up to a minute)."""

from __future__ import annotations

from math import inf

import msgspec

from ownerserve.kv.errors import InvalidInput

BACKOFF_S, BACKOFF_MOST_S, JITTER = 0.5, 8.0, 0.25
RETRY_AFTER_MOST_S = 60.0
"""One that is told to wait longer goes by its backoff."""


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of all clients. `retries`: so often a turn is asked for again, 0: never.
    `timeout_s`: after so long without a first token its client hangs up; None: it waits."""

    retries: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise InvalidInput("retries", f"{self.retries}", "use 0 or more")
        if self.timeout_s is not None and not 0.0 < self.timeout_s < inf:
            raise InvalidInput("timeout_s", f"{self.timeout_s}", "use more than 0, or None")

    def wait_s(self, retries: int, retry_after_s: float | None, chance: float) -> float:
        """Return how long a client waits that has asked again `retries` times; `chance` is in
        [0, 1)."""
        if retry_after_s is not None and 0.0 < retry_after_s <= RETRY_AFTER_MOST_S:
            return retry_after_s
        backoff_s: float = min(BACKOFF_S * 2.0**retries, BACKOFF_MOST_S)
        return backoff_s * (1.0 - JITTER * chance)
