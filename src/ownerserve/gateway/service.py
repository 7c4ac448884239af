"""A gateway is one process: the state, the listener, the pools, the health probes, and their end.

Owns the event loop's tasks and the set of clients. `start` opens the port when every worker has
been asked once; `drain` lets what is live run to its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from itertools import count

from msgspec.structs import replace

from ownerserve.directory.port import Directory
from ownerserve.gateway.config import Config
from ownerserve.gateway.discovery.opening import open_sources
from ownerserve.gateway.discovery.watching import Discovery
from ownerserve.gateway.exchange.exchange import Exchange
from ownerserve.gateway.exchange.legs import Legs
from ownerserve.gateway.http.bodies import BodyBudget
from ownerserve.gateway.http.callers import ChangingCallers
from ownerserve.gateway.http.client import ClientConnection, HttpRequest
from ownerserve.gateway.http.door import Door
from ownerserve.gateway.http.model_list import Models, union
from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.http.server_tls import ServerTls, TlsFiles
from ownerserve.gateway.logs import DirectoryLog, tell
from ownerserve.gateway.moves import Moves
from ownerserve.gateway.processes.part import GatewayPart
from ownerserve.gateway.rollout.reloading import Reloading
from ownerserve.gateway.rollout.shadow_log import ShadowLog
from ownerserve.gateway.roster import Roster
from ownerserve.gateway.turn_moves import TurnMoves
from ownerserve.gateway.turns import Turns
from ownerserve.gateway.wishes import Wishes
from ownerserve.kv.listening import (
    GATEWAY,
    UNIX,
    close_listener,
    open_listener,
    open_unix_listener,
)
from ownerserve.router.messages import Drain
from ownerserve.router.policies.apart import lacking, unmet

Prepare = Callable[[], Awaitable[None]]
"""What is done once the workers were asked, before anybody is let in."""
SWEEP_INTERVAL_S = 5.0
TIDY_INTERVAL_S = 1.0
LAST_WORD_S = 0.05
"""So long those who came last have to be told that nothing more is taken."""
FULL_IDLE_S = 0.5
"""While the house is full, who has no request for longer than this has to go."""

log = logging.getLogger("ownerserve.gateway")


def web_address(host: str, port: int, tls: TlsFiles | None) -> str:
    """Return the URL of a listener."""
    named = f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{named}:{port}"


def data_url(config: Config, port: int) -> str:
    """Return where clients come to."""
    if config.unix is not None:
        return f"{UNIX}{config.unix}"
    return web_address(config.host, port, config.tls)


def bind_data_port(config: Config) -> socket.socket:
    """Return the data port's socket, bound. Raises InvalidInput."""
    if config.unix is None:
        return open_listener(GATEWAY, config.host, config.port, protection=config.protection)
    return open_unix_listener(config.unix, config.unix_mode, field="--listen")


class Gateway:
    """A gateway is one process's data port and everything behind it.

    `directory`: where workers say what they own, and other gateways ask too. Without it sessions
    are known by this gateway's own tables and by what workers say that they hold. `part`: what it
    is of a gateway that is several processes; None: it is alone.
    """

    def __init__(
        self, config: Config, directory: Directory | None = None, part: GatewayPart | None = None
    ) -> None:
        config.check()
        self.config = config
        self.tls = None if config.tls is None else ServerTls(config.tls)
        self.admin_tls = None if config.admin_tls is None else ServerTls(config.admin_tls)
        self.part = part
        self.turns = turns = Turns(config, directory, None if part is None else part.homes)
        self.refusals = turns.refusals
        self.handing = None if part is None else part.handing(turns.asking)
        self.legs = Legs(turns, config)
        self.now = turns.now
        self.state = turns.state
        limits = config.limits
        self.callers = ChangingCallers(limits.callers)
        self.limits = replace(limits, callers=self.callers)
        self.reloading: Reloading | None = None
        """Where its settings can be read again; None: nowhere."""
        self.bodies = BodyBudget(config.bodies_max_bytes)
        self.clients: set[ClientConnection] = set()
        self.draining = False
        self.directory_log = DirectoryLog()
        self.roster = Roster(config, turns)
        self.moves = Moves(turns)
        self.turn_moves = TurnMoves(turns, self.clients)
        self.discovery = Discovery(self.roster, open_sources(config))
        self.monitors = self.roster.monitors
        self.inventories = self.roster.inventories
        self._tasks: list[asyncio.Task[None]] = []
        self.door: Door | None = None
        self._ids = count(1)
        self._id_prefix = f"os-{os.urandom(6).hex()}-"

    # What client connections ask (http.client.ClientPort)

    @property
    def workers_up(self) -> int:
        """How many workers may be chosen."""
        return len(self.state.fleet.up)

    def came(self, client: ClientConnection) -> None:
        """Count a client that is inside."""
        self.clients.add(client)

    def left(self, client: ClientConnection) -> None:
        """Count a client no longer; there may be room for another."""
        self.clients.discard(client)
        if self.door is not None:
            self.door.left(len(self.clients))

    def next_request_id(self) -> bytes:
        """Make an id for a request that came without one: unique among gateways, cheap."""
        return f"{self._id_prefix}{next(self._ids)}".encode()

    def models(self) -> Models:
        """Return what the workers that are up serve, together."""
        up = {worker.id for worker in self.state.fleet.up}
        return union(monitor.models for name, monitor in self.monitors.items() if name in up)

    def rejected(self, rejected: Rejected) -> None:
        """Count a client's request that is told no."""
        self.turns.observer.rejected(rejected)

    def begin(self, client: ClientConnection, request: HttpRequest) -> Exchange:
        """Make the exchange that has the request answered; it is not started."""
        given = request.head.request_id
        return Exchange(
            self.turns,
            self.legs,
            client,
            request=request,
            request_id=given or self.next_request_id(),
        )

    # The process

    @property
    def port(self) -> int:
        """Return the data port, once the gateway listens."""
        assert self.door is not None
        return self.door.port

    @property
    def url(self) -> str:
        """Return where clients come to, once the gateway listens."""
        return data_url(self.config, self.port)

    async def start(
        self, bound: socket.socket | None = None, *, prepare: Prepare | None = None
    ) -> None:
        """Take the port, unless it is given `bound`, ask every worker once, `prepare`, then listen.
        The file of a Unix socket that is given is the giver's: others may listen there too.

        Raises InvalidInput when the port can't be had, or all have answered and none offers what
        the policy needs. One that has not answered may: until then turns run on the spot, and are
        counted (`not_offered`).
        """
        end = close_listener if bound is None else socket.socket.close
        if bound is None:
            bound = bind_data_port(self.config)
        try:
            await self._start(bound, prepare, end)
        except BaseException:
            end(bound)
            raise

    async def _start(
        self, bound: socket.socket, prepare: Prepare | None, end: Callable[[socket.socket], None]
    ) -> None:
        await self.roster.ask_all()
        await self.discovery.begin()
        self._look_at_offers()
        await asyncio.gather(*(reader.read() for reader in self.inventories.values()))
        loop = asyncio.get_running_loop()
        self.roster.watch()
        if prepare is not None:
            await prepare()
        clients_max = self.turns.share.clients_max
        self.door = Door(
            bound, lambda: ClientConnection(self), clients_max=clients_max, tls=self.tls, end=end
        )
        self.door.open()
        watches = [self._sweep(), self._tidy(), self._look_at_answers()]
        watches += [self.moves.run(), self.turn_moves.run()]
        if self.turns.finder is not None:
            watches.append(Wishes(self.turns, self.turns.finder).run())
        self._tasks = [loop.create_task(watch) for watch in watches]

    async def drain(self) -> None:
        """Say on /health that this is the end, and serve on for `drain_notice_s`; then take no more
        and wait for what is live, at most `drain_timeout_s`; then close all."""
        self.draining = True
        tell(logging.INFO, "draining", live=self.state.live)
        await asyncio.sleep(self.config.drain_notice_s)
        self.state.handle(Drain(), self.now())
        self.turns.admission.let_all_in(self.now())
        assert self.door is not None
        self.door.let_last_in()
        self.door.close()
        deadline_s = self.now() + self.config.drain_timeout_s
        await asyncio.sleep(LAST_WORD_S)
        while self.state.live and self.now() < deadline_s:
            await asyncio.sleep(0.02)
        for client in list(self.clients):
            if not client.is_pumped:  # those are answered by another process, which drains too
                client.stop()
        while any(client.is_pumped for client in self.clients) and self.now() < deadline_s:
            await asyncio.sleep(0.02)
        tell(logging.INFO, "drained", live=self.state.live)
        await self.stop()

    async def stop(self) -> None:
        """Close everything now."""
        if self.door is not None:
            self.door.close()
        for task in self._tasks:
            task.cancel()
        await self.discovery.stop()
        await asyncio.gather(self.roster.stop(), *self._tasks, return_exceptions=True)
        for client in list(self.clients):
            client.stop()
        for pool in self.turns.pools.values():
            pool.close_idle()
        if self.turns.finder is not None:
            self.turns.finder.close()
        self.turns.entering.close()
        self.turns.releasing.close()
        self.turns.lines.close()
        await asyncio.to_thread(self.turns.tracer.close)
        await asyncio.sleep(0)  # let the transports report their end

    def _look_at_offers(self) -> None:
        """Check that the policy can be what its name says, over the workers that answered. Raises
        InvalidInput when all have answered and it can't; warns while some have not."""
        answered = len({worker.id for worker in self.state.fleet if worker.up})
        action = unmet(self.turns.rollout.steering.policy, self.state.fleet.candidates(None))
        name = self.turns.rollout.choice.live_policy
        if action is None or (self.config.places and not answered):
            return
        if answered == len(self.turns.pools):
            if self.turns.finder is not None:
                self.turns.finder.close()
            raise lacking(name, action, answered)
        log.warning(
            "policy %s needs %s, which none of the %d workers that answered offers; %d have not"
            " answered: until one offers it, turns run on the spot (reason not_offered)",
            name, action.value, answered, len(self.turns.pools) - answered,
        )  # fmt: skip

    async def _tidy(self) -> None:
        """Give the memory of bodies that are gone back to the system; look after renewed
        certificates; make room while the house is full; tell what became of the directory."""
        shadow_log = ShadowLog(self.now())
        while True:
            await asyncio.sleep(TIDY_INTERVAL_S)
            self.bodies.tidy()
            for tls in (self.tls, self.admin_tls):
                if tls is not None:
                    tls.look()
            if self.turns.finder is not None:
                self.directory_log.look(self.turns.finder.answers)
            shadow_log.look(self.turns.rollout.shadows, self.now())
            if self.door is None or not self.door.is_shut:
                continue
            for client in list(self.clients):
                client.expire(self.now(), idle_timeout_s=FULL_IDLE_S)
            self.door.left(len(self.clients))

    async def _look_at_answers(self) -> None:
        """End the waits for workers that are up and send nothing of an answer."""
        while True:
            config = self.config
            patience_s = min(config.first_byte_timeout_s, config.whole_answer_timeout_s)
            await asyncio.sleep(min(SWEEP_INTERVAL_S, patience_s / 4))
            for pool in list(self.turns.pools.values()):
                try:
                    pool.look(self.now())
                except Exception:  # a task's root: else nobody's patience would ever end
                    log.exception("a look at who waits for worker %s: a fault", pool.address.worker)

    async def _sweep(self) -> None:
        """Close clients that keep us waiting, and let in who may enter: one timer for all of
        them."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = self.now()
            try:
                for client in list(self.clients):
                    client.expire(now, idle_timeout_s=self.limits.idle_timeout_s)
                self.turns.admission.look(now)
            except Exception:  # a task's root: else nobody's time would ever be over
                log.exception("a look at who waits, and for whom we wait, ended in a fault")
