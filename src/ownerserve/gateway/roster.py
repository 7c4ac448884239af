"""The roster says which workers a gateway has: who joins, who leaves, who gets no new turn.

| asked | does | the router hears |
|---|---|---|
| at start, join | asks the worker once, then watches it | WorkerUp, by its own answer |
| drain | its good answers are held back from the router | WorkerDown (drained) |
| undrain | they are passed on again, the first at once | WorkerUp |
| hold, resume | the same by the word of who found the worker; an operator's drain outlasts it | |
| leave | as drain; it is forgotten when nothing runs there | WorkerDown (removed), WorkerLeft |

Owns the health monitors, the inventory readers, their tasks, and whose good answers are held back.
A worker that is held back is probed on, so that waits at one that dies end as everywhere. What its
operator changes is kept in no file: a restart begins with the config's workers, and whom discovery
finds.
"""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum

from msgspec.structs import replace

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.logs import tell
from ownerserve.gateway.turns import Turns
from ownerserve.gateway.workers.health import HealthMonitor, News
from ownerserve.gateway.workers.inventory import InventoryReader
from ownerserve.gateway.workers.pace import Pace, WorkerQuick, WorkerSlow
from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.ids import WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.messages import Arm, Down, Stamped, WorkerDown, WorkerLeft, WorkerUp

SOME_OTHER = "(not learnt)"
"""Stands for the models of a worker whose list is not known: requests are looked at for theirs."""
OPERATOR = "its operator's word"
LOOK_S = 0.05
"""How often it is looked whether a worker that leaves still runs something."""


class Stay(StrEnum):
    """A stay says what a worker is to this gateway, by its operator's word or its source's."""

    SERVING = "serving"
    DRAINED = "drained"
    UNREADY = "unready"
    """No new turn by the word of who found it (discovery), not of its operator."""
    LEAVING = "leaving"


class RosterProblem(StrEnum):
    """A problem says why the roster can't be changed so."""

    UNKNOWN_WORKER = "unknown_worker"
    KNOWN_WORKER = "known_worker"
    LEAVING_WORKER = "leaving_worker"


class RosterRefused(OwnerServeError):
    """The operator must act: the roster can't be changed so, for the reason `problem`."""

    def __init__(self, problem: RosterProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class Roster:
    """The roster of one gateway's workers, by name."""

    def __init__(self, config: Config, turns: Turns) -> None:
        self.monitors: dict[WorkerId, HealthMonitor] = {}
        self.inventories: dict[WorkerId, InventoryReader] = {}
        self._config = config
        self._turns = turns
        self._state = turns.state
        self._held: dict[WorkerId, Stay] = {}
        self._unready: set[WorkerId] = set()
        self._tasks: dict[WorkerId, list[asyncio.Task[None]]] = {}
        for address in config.workers:
            self._add(address)

    def stay(self, worker: WorkerId) -> Stay:
        """Return what a worker of the roster is to this gateway."""
        held = self._held.get(worker)
        if held is not None:
            return held
        return Stay.UNREADY if worker in self._unready else Stay.SERVING

    # The process

    async def ask_all(self) -> None:
        """Ask every worker once, and tell the router what they say."""
        monitors = self.monitors.values()
        for news in await asyncio.gather(*(monitor.probe() for monitor in monitors)):
            self._heard_all(news)  # in the order of the settings, whoever answered first

    def watch(self) -> None:
        """Go on to ask every worker, each in its tasks."""
        for worker in self.monitors.keys() - self._tasks.keys():
            self._watch(worker)

    async def stop(self) -> None:
        """End all tasks."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What an operator asks

    async def join(
        self, address: Address, *, by: str | None = None, stay: Stay = Stay.SERVING
    ) -> None:
        """Take a worker in: it is asked once, and gets turns from its first good answer on, or when
        it is no more UNREADY. Raises RosterRefused for one that is here."""
        worker = address.worker
        if worker in self.monitors:
            raise RosterRefused(RosterProblem.KNOWN_WORKER, f"{worker} is a worker here")
        self._add(address)
        if stay is Stay.UNREADY:
            self._unready.add(worker)
        self._watch(worker)
        tell(logging.INFO, "worker_joined", worker=worker, by=by)
        await self._ask(worker)

    def drain(self, worker: WorkerId) -> None:
        """Send the worker no new turn until `undrain`. Raises RosterRefused."""
        self._check(worker)
        self._held[worker] = Stay.DRAINED
        self._take_out(worker, Down.DRAINED, OPERATOR)

    async def undrain(self, worker: WorkerId) -> None:
        """Let the worker have turns again, from its next good answer on. Raises RosterRefused."""
        self._check(worker)
        if self._held.pop(worker, None) is not None:
            tell(logging.INFO, "worker_undrained", worker=worker)
            await self._ask(worker)

    def hold(self, worker: WorkerId, *, word: str) -> None:
        """Send the worker no new turn until `resume`, by its source's `word`. Raises
        RosterRefused."""
        self._check(worker)
        self._unready.add(worker)
        self._take_out(worker, Down.DRAINED, word)

    def resume(self, worker: WorkerId) -> None:
        """Let the worker have turns again, from its next good answer on, unless its operator says
        no."""
        if worker in self._unready:
            self._unready.discard(worker)
            tell(logging.INFO, "worker_resumed", worker=worker)

    def leave(self, worker: WorkerId, *, word: str = OPERATOR) -> None:
        """Send the worker no new turn, and forget it when nothing runs there. Raises
        RosterRefused."""
        self._check(worker)
        self._held[worker] = Stay.LEAVING
        self._take_out(worker, Down.REMOVED, word)
        self._tasks[worker].append(asyncio.get_running_loop().create_task(self._see_off(worker)))

    def assign(self, worker: WorkerId, arm: Arm) -> None:
        """Have the worker run turns of that arm's sessions from now on. Raises RosterRefused."""
        self._check(worker)
        monitor = self.monitors[worker]
        monitor.address = replace(monitor.address, arm=arm)
        self._say_arms()

    def _check(self, worker: WorkerId) -> None:
        """Raise RosterRefused unless the worker is here to stay."""
        if worker not in self.monitors:
            raise RosterRefused(RosterProblem.UNKNOWN_WORKER, f"{worker} is no worker here")
        if self.stay(worker) is Stay.LEAVING:
            raise RosterRefused(RosterProblem.LEAVING_WORKER, f"{worker} is leaving")

    def _take_out(self, worker: WorkerId, why: Down, word: str) -> None:
        """Tell the router that the worker is out, whose good answers are held back. Its line and
        its names are kept: owners there may be asked to hand sessions over."""
        self._state.handle(WorkerDown(worker, why), self._turns.now())
        self._turns.worker_log.down(worker, why=why.value, cause=word)
        self._say_models()

    async def _ask(self, worker: WorkerId) -> None:
        """Ask the worker now, and tell the router what it says, unless it went meanwhile."""
        monitor = self.monitors[worker]
        news = await monitor.probe()
        if self.monitors.get(worker) is monitor:
            self._heard_all(news)

    async def _see_off(self, worker: WorkerId) -> None:
        """Wait until nothing runs at the worker, then forget it."""
        while any(unit.requests for unit in self._state.fleet if unit.id == worker):
            await asyncio.sleep(LOOK_S)
        self._state.handle(WorkerLeft(worker), self._turns.now())
        address = self.monitors.pop(worker).address
        del self.inventories[worker], self._held[worker]
        self._unready.discard(worker)
        self._turns.worker_names.down(worker)
        self._turns.lines.learn(worker, address.host, None)
        self._turns.pools.pop(worker).close_idle()
        self._say_models()
        self._say_arms()
        tell(logging.INFO, "worker_left", worker=worker)
        for task in self._tasks.pop(worker):
            if task is not asyncio.current_task():
                task.cancel()

    # Workers

    def _add(self, address: Address) -> None:
        turns, worker = self._turns, address.worker
        turns.open_pool(address)
        self.monitors[worker] = HealthMonitor(
            address, self._config, access=turns.access, tell=self._heard
        )
        self._say_arms()
        self.inventories[worker] = InventoryReader(
            address, self._config, access=turns.access, fleet=self._state.fleet, tell=turns.told
        )

    def _watch(self, worker: WorkerId) -> None:
        loop = asyncio.get_running_loop()
        runs = self.monitors[worker].run(), self.inventories[worker].run()
        self._tasks[worker] = [loop.create_task(run) for run in runs]

    def _heard_all(self, news: list[News]) -> None:
        for one in news:
            self._heard(one)

    def _heard(self, event: News | Pace) -> None:
        turns = self._turns
        if isinstance(event, WorkerSlow):
            turns.worker_log.slow(event.worker, unanswered_s=event.waited_s)
            return
        if isinstance(event, WorkerQuick):
            turns.worker_log.quick(event.worker)
            return
        if isinstance(event, WorkerUp) and self.stay(event.worker) is not Stay.SERVING:
            return
        self._state.handle(event, turns.now())
        match event:
            case WorkerUp(worker, dp_rank, incarnation):
                served = ",".join(sorted(self.monitors[worker].models)) or None
                turns.worker_log.up(worker, models=served, life=incarnation, dp_rank=dp_rank)
                self.inventories[worker].call()
                stated = self.monitors[worker].stated
                if incarnation is not None:
                    unit = RoutingUnit(worker, dp_rank, incarnation)
                    turns.worker_names.up(unit, None if stated is None else stated.unit.worker)
                rpc = None if stated is None else stated.profile.rpc
                turns.lines.learn(worker, turns.pools[worker].address.host, rpc)
            case WorkerDown(worker, why):
                turns.worker_log.down(worker, why=why.value, cause=self.monitors[worker].cause)
                if why is Down.DRAINED:  # it leaves: its line and names are kept, as in _take_out
                    self._say_models()
                    return
                turns.worker_names.down(worker)
                turns.lines.learn(worker, turns.pools[worker].address.host, None)
                turns.pools[worker].close_idle()
                if why is Down.UNHEALTHY:  # one that nobody listens at may be ending what it has
                    turns.pools[worker].found_out()
            case Stamped():
                return
        self._say_models()

    def _say_arms(self) -> None:
        """Tell who decides which workers are the canary's."""
        self._turns.rollout.have_canary_workers(
            name for name, one in self.monitors.items() if one.address.arm is Arm.CANARY
        )

    def _say_models(self) -> None:
        """Tell who reads requests which models there are to be asked for."""
        names = {name for one in self._state.fleet for name in one.profile.names}
        if any(monitor.unlearnt is not None for monitor in self.monitors.values()):
            names.add(SOME_OTHER)
        self._turns.asking.serves(names)
