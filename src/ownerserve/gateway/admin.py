"""The admin port shows what the gateway knows, to people and Prometheus. It is separate from the
data port, so that it can be kept private and can't slow a request down by its framework."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Iterator
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Literal

import msgspec
import uvicorn
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ownerserve.gateway.admin_api.answers import (
    AdminAnswer,
    CopySource,
    DecisionRow,
    Decisions,
    DirectoryAnswers,
    Discovered,
    ErrorRow,
    GatewayStatus,
    HealthAnswer,
    LearntFacts,
    LogLevel,
    Owners,
    PricedBy,
    PricedWay,
    ProbeRow,
    Requests,
    RoutingConstants,
    SessionsAnswer,
    ShadowDecision,
    WaitRow,
    WantedMigration,
    WorkerLoadRow,
)
from ownerserve.gateway.admin_api.connection import AdminConnection
from ownerserve.gateway.admin_api.endpoints import (
    SAFE,
    Asked,
    Endpoint,
    Run,
    app_of,
    problem_response,
)
from ownerserve.gateway.admin_api.hosts import KnownHosts
from ownerserve.gateway.admin_api.openapi import Key, openapi
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.server_tls import ServerTls
from ownerserve.gateway.live import PAGE, counts, device_memory, newest_owners, newest_sessions
from ownerserve.gateway.logs import LEVELS, level_name, set_level
from ownerserve.gateway.metrics import GatewayCollector
from ownerserve.gateway.rollout.routes import rollout_endpoints
from ownerserve.gateway.turns import Decided
from ownerserve.gateway.worker_admin import worker_endpoints
from ownerserve.gateway.workers.health import HealthMonitor
from ownerserve.kv.listening import ADMIN, open_listener
from ownerserve.router.decision import BesideDecision, Move, Replica
from ownerserve.router.messages import Dispatch
from ownerserve.router.sessions import Copy
from ownerserve.router.settings import DERIVED
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Worker

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway


def status(gateway: Gateway) -> GatewayStatus:
    """Return the workers with their load, and the account of all requests."""
    state = gateway.state
    account = state.account
    return GatewayStatus(
        age_s=round(gateway.now() - gateway.turns.observer.began_at_s, 3),
        policy=gateway.turns.rollout.choice.policy,
        mode=gateway.turns.rollout.choice.mode,
        draining=gateway.draining,
        constants=constants(state),
        sessions=len(state.sessions),
        content_sessions=len(gateway.turns.asking.chain),
        directory=_directory(gateway),
        clients=len(gateway.clients),
        live=state.live,
        requests=Requests(
            received=account.received,
            done=account.done,
            rejected=account.rejected,
            finished=account.finished,
            broken=account.broken,
            aborted=account.aborted,
        ),
        discovery=discovered(gateway),
        workers=[_load(gateway, worker) for worker in state.fleet],
        probes={name: _probe(monitor) for name, monitor in gateway.monitors.items()},
        never_up=[name for name in gateway.turns.pools if name not in {w.id for w in state.fleet}],
        **counts(gateway),
    )


def constants(state: RouterState) -> RoutingConstants:
    """Return the constants in force, and what they were learnt from."""
    learning, facts = state.learning, None
    if learning is not None and learning.facts is not None:
        facts = LearntFacts(**structs.asdict(learning.facts))
    return RoutingConstants(
        **{name: round(getattr(state.settings, name), 4) for name in DERIVED},
        by_hand=state.settings.by_hand,
        turns=0 if learning is None else learning.turns,
        learnt_from=facts,
    )


def _load(gateway: Gateway, worker: Worker) -> WorkerLoadRow:
    """Return a routing unit with its load, as the router counts it now."""
    pool = gateway.turns.pools[worker.id]
    return WorkerLoadRow(
        worker=worker.id,
        up=worker.up,
        requests=worker.requests,
        pending_prefill_tokens=worker.pending_prefill_tokens,
        held_tokens=worker.held_tokens,
        sessions=worker.bound_sessions,
        dp_rank=worker.dp_rank,
        incarnation=worker.incarnation,
        model=worker.profile.model or None,
        queue_ms=round(worker.queue_ms, 3),
        batch=worker.batch,
        occupancy=round(worker.occupancy, 4),
        busy_share=worker.load.busy_share,
        refill_shares=worker.load.refill_shares,
        profile=_profile(gateway, worker),
        device_memory=device_memory(gateway.monitors[worker.id]),
        connections_opened=pool.opened,
        connections_reused=pool.reused,
        connections_idle=pool.idle,
    )


def _directory(gateway: Gateway) -> DirectoryAnswers | None:
    """Return what the directory answered, and which workers own sessions there; None when no
    directory is asked."""
    if gateway.turns.finder is None:
        return None
    stated = {name: monitor.stated for name, monitor in gateway.monitors.items()}
    owning = [name for name, one in stated.items() if one and one.profile.owns_sessions]
    return DirectoryAnswers(
        state=gateway.directory_log.kind if gateway.turns.rollout.is_normal else "not_asked",
        answers=dict(gateway.turns.finder.answers),
        workers_owning=owning,
    )


def discovered(gateway: Gateway) -> dict[str, Discovered]:
    """Return what each source of workers says."""
    discovery = gateway.discovery
    return {
        name: Discovered(
            workers=count,
            failures=discovery.failures[name],
            cause=discovery.causes.get(name),
        )
        for name, count in discovery.named().items()
    }


def _probe(monitor: HealthMonitor) -> ProbeRow:
    """Return what the last probes of a worker found, also of one that never was up."""
    unlearnt = monitor.unlearnt
    return ProbeRow(
        states_itself=monitor.stated is not None,
        models=sorted(monitor.models),
        assigned=monitor.address.models,
        models_unknown=None if unlearnt is None else unlearnt.why,
        problems=monitor.problems,
        slow=monitor.is_slow,
        cause=monitor.cause,
    )


def _profile(gateway: Gateway, worker: Worker) -> PricedBy:
    """Return what the worker is priced by, and what it says of itself."""
    profile, monitor = worker.profile, gateway.monitors[worker.id]
    speed, stated = worker.speed, monitor.stated
    return PricedBy(
        models=sorted(profile.names - {""}),
        role=profile.role,
        actions=sorted(profile.actions),
        spec_digest=profile.spec_digest,
        kv_bytes_total=profile.kv_bytes_total,
        kv_bytes_per_token=speed.kv_bytes_per_token,
        kv_bytes_per_sequence=speed.kv_bytes_per_sequence,
        prefill_ms=msgspec.structs.astuple(speed.prefill),
        step_ms=speed.step_ms,
        step_ms_per_sequence=speed.step_ms_per_sequence,
        is_measured=profile.is_measured,
        stated=None if stated is None else stated.profile,
        problems=monitor.problems,
    )


def decision(decided: Decided, now: float) -> DecisionRow:
    """Return one decision; `age_s` is how long ago it was made."""
    identity, outcome = decided.identity, decided.outcome
    row = DecisionRow(
        age_s=round(now - decided.at_s, 3),
        request_id=decided.request_id.decode("latin-1"),
        trace_id=decided.trace_id,
        session=identity.session if identity else None,
        named_by=identity.source if identity else None,
        parent=identity.parent if identity else None,
        worker=None,
        reason=outcome.reason if isinstance(outcome, Dispatch) else outcome.refusal,
        waits=[
            WaitRow(
                reason=one.reason,
                waited_s=round(one.waited_s, 3),
                place=one.came.place,
                of=one.came.of,
            )
            for one in decided.waits
        ],
    )
    return _dispatched(row, outcome) if isinstance(outcome, Dispatch) else row


def _dispatched(row: DecisionRow, outcome: Dispatch) -> DecisionRow:
    """Return the row with all that is told of a turn that was sent."""
    decision = outcome.decision
    source, prefill, wanted = decision.source, decision.prefill, decision.wanted
    moved = None
    if wanted is not None:
        moved = WantedMigration(
            source=wanted.source.id, target=wanted.target.id, tokens=wanted.tokens
        )
    return structs.replace(
        row,
        worker=outcome.worker,
        attempt=outcome.attempt,
        prefill_tokens=outcome.prefill_tokens,
        prompt_tokens=outcome.prompt_tokens,
        turn=outcome.turn,
        arm=outcome.arm,
        action=decision.action,
        expected_cached_tokens=decision.cached_tokens,
        prefill_worker=None if prefill is None else prefill.id,
        source=None if source is None else _source(source),
        wanted_migration=moved if isinstance(wanted, Move) else None,
        wanted_replica=moved if isinstance(wanted, Replica) else None,
        shadow=None if decision.beside is None else _shadow(decision.beside),
        priced=[
            PricedWay(
                action=option.action,
                worker=option.worker.id,
                total_ms=round(option.total_ms, 3),
                cached_tokens=option.cached_tokens,
                terms_ms={name: round(ms, 3) for name, ms in option.terms().items()},
            )
            for option in decision.alternatives
        ],
    )


def _shadow(beside: BesideDecision) -> ShadowDecision:
    return ShadowDecision(
        policy=beside.policy,
        worker=beside.worker.id,
        action=beside.action,
        reason=beside.reason,
        expected_cached_tokens=beside.cached_tokens,
        regret_ms=round(beside.regret_ms, 3),
    )


def _source(copy: Copy) -> CopySource:
    holder = "store" if copy.worker is None else copy.worker.id
    return CopySource(worker=holder, tier=copy.tier.name.lower(), tokens=copy.tokens)


class NewLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The least that the log is to have from now on."""

    level: Literal["debug", "info", "warning", "error"]


def log_endpoints() -> list[Endpoint]:
    """Return the endpoints of the log's level, which is this process's."""

    def told() -> LogLevel:
        return LogLevel(level=level_name(), levels=LEVELS)

    async def get_log_level(asked: Asked) -> AdminAnswer:
        return told()

    async def put_log_level(asked: Asked) -> AdminAnswer:
        set_level(asked.body.level)
        return told()

    get = Endpoint(
        method="GET",
        path="/log-level",
        summary="The least that the log has",
        answer=LogLevel,
        run=get_log_level,
    )
    put = structs.replace(
        get, method="PUT", summary="Change it, until the gateway ends", run=put_log_level
    )
    return [get, structs.replace(put, takes=NewLevel, example='{"level": "info"}')]


def endpoints_of(gateway: Gateway) -> list[Endpoint]:
    """Return the table of all endpoints; the last one describes them all."""
    registry = CollectorRegistry()
    registry.register(GatewayCollector(gateway))

    async def get_health(asked: Asked) -> AdminAnswer:
        return HealthAnswer(workers_up=len(gateway.state.fleet.up))

    async def get_status(asked: Asked) -> AdminAnswer:
        return status(gateway)

    async def get_decisions(asked: Asked) -> AdminAnswer:
        kept = islice(reversed(gateway.turns.observer.decisions), asked.last)
        return Decisions(decisions=[decision(one, gateway.now()) for one in kept])

    async def get_sessions(asked: Asked) -> AdminAnswer:
        return newest_sessions(gateway, asked.last)

    async def get_owners(asked: Asked) -> AdminAnswer:
        return newest_owners(gateway, asked.last)

    async def get_metrics(asked: Asked) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def get_openapi(asked: Asked) -> Response:
        return Response(document, media_type="application/json")

    def get(path: str, summary: str, answer: type[AdminAnswer] | str, run: Run) -> Endpoint:
        return Endpoint(method="GET", path=path, summary=summary, answer=answer, run=run)

    def newest(path: str, summary: str, answer: type[AdminAnswer], run: Run) -> Endpoint:
        return structs.replace(get(path, summary, answer, run), counts=("last",))

    load, turns = "Workers, their load, and the account of all requests", "Decisions, newest first"
    page = get("/", "The live page", "text/html", get_page)
    table = [
        structs.replace(page, is_public=True),
        get("/health", "How many workers may be chosen", HealthAnswer, get_health),
        get("/status", load, GatewayStatus, get_status),
        newest("/decisions", turns, Decisions, get_decisions),
        newest("/sessions", "The sessions used last", SessionsAnswer, get_sessions),
        newest("/owners", "Who owns the sessions used last", Owners, get_owners),
        get("/ownerserve/status", load, GatewayStatus, get_status),
        newest("/ownerserve/decisions", turns, Decisions, get_decisions),
        get("/metrics", "Prometheus metrics", "text/plain", get_metrics),
        *log_endpoints(),
        *worker_endpoints(gateway),
        *rollout_endpoints(gateway),
        get("/openapi.json", "This description", "application/json", get_openapi),
    ]
    key = None if gateway.config.admin_key is None else Key()
    document = msgspec.json.encode(openapi(table, key=key))
    return table


def admin_app(gateway: Gateway) -> Starlette:
    """Make the app of the live page and of all endpoints of the API."""
    return app_of(endpoints_of(gateway))


async def get_page(asked: Asked) -> Response:
    """Answer with the live page: it has no data in it, and asks for all of that itself."""
    return Response(PAGE.document, media_type="text/html", headers=PAGE.headers)


class Keyed:
    """Nobody who lacks the key is answered by a keyed app. The key is compared in constant time,
    before anything else is looked at."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._wanted = b"Bearer " + key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(told, self._wanted):
            await self._app(scope, receive, send)
            return
        problem = ErrorRow(
            code="no_key",
            field="authorization",
            message="authorization: the admin port asks for its key",
            mend="send `Authorization: Bearer KEY`",
        )
        headers = {"www-authenticate": "Bearer"}
        await problem_response(HTTPStatus.UNAUTHORIZED, problem, headers)(scope, receive, send)


def keyed_app(app: ASGIApp, key: str) -> ASGIApp:
    """Return `app` behind the key, but for the live page: a browser asks for that without one, and
    the page asks its reader for the key."""
    keyed = Keyed(app, key)

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope["path"] == "/" and scope["method"] in SAFE
        await (app if is_page else keyed)(scope, receive, send)

    return asked


class AdminServer(uvicorn.Server):
    """The admin server is uvicorn in the gateway's own loop; it leaves signals to the gateway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def admin_server(gateway: Gateway) -> tuple[AdminServer, socket.socket]:
    """Make a server for the admin port and bind its socket; run `server.serve(sockets=[socket])`.
    Raises InvalidInput when the port can't be had."""
    config = gateway.config
    listener = open_listener(
        ADMIN, config.admin_host, config.admin_port, protection=config.admin_protection
    )
    return server_of(admin_app(gateway), config, gateway.admin_tls), listener


def server_of(app: ASGIApp, config: Config, tls: ServerTls | None) -> AdminServer:
    """Make the server of an app that stands on the admin port, behind its key and certificate if
    there are any; without both it answers to known hosts alone."""
    if config.admin_key is not None:
        app = keyed_app(app, config.admin_key)
    elif tls is None:
        app = KnownHosts(app, config.admin_host)
    serving = uvicorn.Config(
        app, http=AdminConnection, ws="none", log_config=None, access_log=False, lifespan="off"
    )
    if tls is not None:
        serving.load()
        serving.ssl = tls.fronting()
    return AdminServer(serving)
