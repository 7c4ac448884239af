"""A calibration finds the cost model beside the store, feeds it while serving, and writes it back.

Owns one file. What it can't read it starts anew: prices are a cache, never a truth.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from threading import Thread

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.events import Loaded, Observation
from ownerserve.plan.cost.model import CostModel, Defaults
from ownerserve.plan.cost.prices import Coefficients, Medium

log = logging.getLogger("ownerserve.node")

SAVE_EVERY_S = 30.0
SAVE_WITHIN_S = 5.0
"""How long the last save waits for the drive."""

UNMEASURED = Defaults(
    "assumed for an unmeasured engine",
    Coefficients(5.0, 0.1, 1e-6),
    {Tier.HOST: Medium(0.05, 4e6), Tier.DISK: Medium(0.5, 1e6), Tier.REMOTE: Medium(8.0, 1e5)},
)
"""A small CPU's order of magnitude; the first turns replace it."""


class Calibration:
    """A `Calibration` is a cost model and the file that it comes from and goes to; `path` None: it
    is not kept."""

    def __init__(self, path: Path | None, defaults: Defaults = UNMEASURED) -> None:
        self.model = _read(path, defaults)
        self._path = path
        self._observed = 0
        self._saved_s = 0.0
        self._writing: Thread | None = None

    def observe(self, seen: Iterable[Observation]) -> None:
        """Learn from what was measured just now; an item of 0 ms is no measurement, and an unknown
        tier's load is passed over."""
        at_s = time.time()
        for item in seen:
            if isinstance(item, Loaded) and item.tier not in self.model.tiers:
                continue
            if item.ms > 0.0:
                self.model.observe(item, at_s)
                self._observed += 1

    def save_if_due(self, now: float) -> None:
        """Write the file when something was learnt and SAVE_EVERY_S have passed; on a thread of its
        own, since a drive may be silent. While a write is under way, what is learnt waits."""
        if self._is_written(0.0) and (data := self.due(now)) is not None:
            self._begin(data)

    def due(self, now: float) -> bytes | None:
        """Return what `save_if_due` would write now, for a caller that must not write on its
        thread, and count it as written; None: nothing is due."""
        if self._path is None or not self._observed or now - self._saved_s < SAVE_EVERY_S:
            return None
        self._saved_s, self._observed = now, 0
        return self.model.dump()

    def save(self) -> None:
        """Write what was learnt since the last time and wait for it, SAVE_WITHIN_S at most."""
        until_s = time.monotonic() + SAVE_WITHIN_S
        if self._is_written(SAVE_WITHIN_S) and self._path is not None and self._observed:
            self._observed = 0
            self._begin(self.model.dump())
        if not self._is_written(max(0.0, until_s - time.monotonic())):
            log.warning("costs were not saved: %s does not answer", self._path)

    def _begin(self, data: bytes) -> None:
        self._writing = Thread(target=self.write, args=(data,), name="node-costs", daemon=True)
        self._writing.start()

    def _is_written(self, within_s: float) -> bool:
        """Return whether the last write has ended, or ends within `within_s` seconds."""
        if self._writing is None:
            return True
        self._writing.join(within_s)
        return not self._writing.is_alive()

    def write(self, data: bytes) -> None:
        """Write the file, all or nothing; on any thread. A failure loses what was learnt since the
        last time, and is logged."""
        if self._path is None:
            return
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            partial.write_bytes(data)
            partial.replace(self._path)
        except OSError as error:
            log.warning("costs were not saved: %s", error)


def _read(path: Path | None, defaults: Defaults) -> CostModel:
    if path is None:
        return CostModel(defaults)
    try:
        return CostModel.restore(path.read_bytes())
    except FileNotFoundError:
        return CostModel(defaults)
    except (OSError, InvalidInput) as error:
        log.warning("costs are measured anew: %s", error)
        return CostModel(defaults)
