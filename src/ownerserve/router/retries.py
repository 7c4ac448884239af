"""How many requests may be tried again: a share of all requests, so that a dying fleet is not
stormed by its own router."""

from __future__ import annotations


class RetryBudget:
    """A purse: each arrival puts `share` in, each retry takes 1 out; at most `attempts` tries."""

    def __init__(self, *, share: float = 0.2, purse_max: float = 64.0, attempts: int = 3) -> None:
        self._share = share
        self._purse_max = purse_max
        self._attempts = attempts
        self._purse = purse_max

    def earn(self) -> None:
        """A request has arrived."""
        purse = self._purse + self._share
        self._purse = purse if purse < self._purse_max else self._purse_max

    def spend(self, failed_attempts: int) -> bool:
        """Whether a request that failed `failed_attempts` times may be tried again."""
        if failed_attempts >= self._attempts or self._purse < 1:
            return False
        self._purse -= 1
        return True
