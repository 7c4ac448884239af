"""Who is up, in which life, and what it is: asks each worker from time to time, tells the state.

A worker of ours answers `/ownerserve/status` with all of it (kv.wire.status), which is read on
every probe: prices follow what the worker measures. Any other engine is asked for `/health`, and
once a life for `/v1/models`. A worker is up with its first good answer, and down after two bad
ones in a row; when nobody listens at its port any more, at once.

Owns counts, the last statement, and what was wrong with it: a statement that can't be read costs a
warning, never a worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.ids import Incarnation
from ownerserve.kv.wire.status import StatusRead, WorkerStatus, load_of, read_status
from ownerserve.router.gateway.config import Address, Config
from ownerserve.router.gateway.fetching import SmallAnswer, fetch
from ownerserve.router.gateway.heads import read_response_head
from ownerserve.router.gateway.stamps import number, read_stamp
from ownerserve.router.gateway.statements import profile_of
from ownerserve.router.messages import Down, Stamped, WorkerDown, WorkerUp
from ownerserve.router.profile import Profile

log = logging.getLogger("ownerserve.gateway")

BAD_ANSWERS_UNTIL_DOWN = 2
STATUS_PATH = b"/ownerserve/status"

News = WorkerUp | WorkerDown | Stamped


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class HealthMonitor:
    """Probes one worker."""

    def __init__(self, address: Address, config: Config, *, tell: Callable[[News], None]) -> None:
        self.address = address
        self.problems: tuple[str, ...] = ()
        """What was wrong with the last statement; empty when nothing was."""
        self.problem_counts: Counter[str] = Counter()
        """Statements of which something was refused, by field."""
        self.stated: WorkerStatus | None = None
        """The last statement; None of an engine that makes none."""
        self._config = config
        self._tell = tell
        self._bad = 0
        self._states_itself = True
        """Until it has answered 404: asked again after it was down."""
        self._life: Incarnation | None = None
        self._profile: Profile | None = None

    async def run(self) -> None:
        """Probe until cancelled; the first time after one interval."""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            for news in await self.probe():
                self._tell(news)

    async def probe(self) -> list[News]:
        """Ask once; nothing when one bad answer says nothing yet."""
        worker = self.address.worker
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                news = await self._by_status() or await self._by_health()
            if news:
                self._bad = 0
                return news
        except ConnectionRefusedError:
            self._bad = BAD_ANSWERS_UNTIL_DOWN
            self._forget()
            return [WorkerDown(worker, Down.UNREACHABLE)]
        except OSError:  # TimeoutError too
            pass
        self._bad += 1
        if self._bad < BAD_ANSWERS_UNTIL_DOWN:
            return []
        self._forget()
        return [WorkerDown(worker, Down.UNHEALTHY)]

    async def _by_status(self) -> list[News]:
        """From the worker's own statement; nothing when it makes none that can be read."""
        if not self._states_itself:
            return []
        answer = await fetch(self.address, STATUS_PATH)
        if not answer.is_good:
            self._states_itself = answer.status != 404
            self.stated = None
            return []
        return self._take(read_status(answer.body))

    def _take(self, read: StatusRead) -> list[News]:
        self.stated = status = read.status
        if status is None:
            self._note(read.problems)
            return []
        worker, default = self.address.worker, self._config.speed
        profile, problems = profile_of(status, status.profile.models, default=default)
        self._note((*read.problems, *problems))
        load = load_of(status.unit, status.load, worker=worker)
        life = load.unit.incarnation or None
        up = WorkerUp(worker, load.unit.dp_rank, life, profile)
        return [up] if life is None else [up, Stamped(load)]

    async def _by_health(self) -> list[News]:
        """From `/health`, which a worker of ours stamps; nothing when it is not well."""
        answer = await fetch(self.address, b"/health")
        if not answer.is_good:
            return []
        worker = self.address.worker
        headers = read_response_head(answer.status, b"", answer.headers).stamp
        stamp = read_stamp(worker, headers)
        life = None if stamp is None else stamp.unit.incarnation
        if self._profile is None or life != self._life:
            self._life, self._profile = life, await self._ask_profile(headers)
        rank = 0 if stamp is None else stamp.unit.dp_rank
        news: list[News] = [WorkerUp(worker, rank, life, self._profile)]
        if stamp is not None and stamp.status is not None:
            news.append(Stamped(stamp.status))
        return news

    async def _ask_profile(self, headers: dict[bytes, bytes]) -> Profile:
        """What the worker serves: its own word, else the engine's list of models."""
        total = number(headers, b"kv-bytes-total") or 0
        told = headers.get(b"model")
        if told is not None:
            return self._profile_of([told.decode("latin-1")], total)
        answer = await fetch(self.address, b"/v1/models")
        return self._profile_of(_names(answer) or [""], total)

    def _profile_of(self, names: Sequence[str], kv_bytes_total: int) -> Profile:
        return Profile(
            model=names[0],
            adapters=frozenset(names[1:]),
            speed=self._config.speed,
            kv_bytes_total=kv_bytes_total,
        )

    def _note(self, problems: tuple[str, ...]) -> None:
        """Count what was wrong with a statement; say so when it is something new."""
        for problem in problems:
            self.problem_counts[problem.partition(":")[0]] += 1
        if problems and problems != self.problems:
            log.warning(
                "worker %s: its /ownerserve/status is not what it should be: %s",
                self.address.worker,
                "; ".join(problems),
            )
        self.problems = problems

    def _forget(self) -> None:
        """The worker is down: what it was says nothing of what comes back."""
        self._profile = self.stated = None
        self._states_itself = True
        self.problems = ()


def _names(answer: SmallAnswer) -> list[str]:
    try:
        models = msgspec.json.decode(answer.body, type=_Models) if answer.body else _Models()
    except UNREADABLE:
        models = _Models()
    return [model.id for model in models.data] if answer.is_good else []
