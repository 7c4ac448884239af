"""The admin port shows what the gateway knows, to people and Prometheus. It is separate from the
data port, so that it can be kept private and can't slow a request down by its framework."""

from __future__ import annotations

import contextlib
import hmac
import re
import socket
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ownerserve.gateway.live import PAGE, counts, device_memory, newest_sessions
from ownerserve.gateway.metrics import GatewayCollector
from ownerserve.gateway.turns import Decided
from ownerserve.gateway.worker_admin import worker_routes
from ownerserve.gateway.workers.health import HealthMonitor
from ownerserve.kv.listening import ADMIN, open_listener
from ownerserve.router.decision import Decision
from ownerserve.router.messages import Dispatch
from ownerserve.router.sessions import Copy
from ownerserve.router.worker import Worker

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway


COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)


def status(gateway: Gateway) -> dict[str, Any]:
    """Return the workers with their load, and the account of all requests, as JSON values."""
    state = gateway.state
    return {
        "age_s": round(gateway.now() - gateway.turns.observer.began_at_s, 3),
        "policy": gateway.config.policy,
        "draining": gateway.draining,
        "sessions": len(state.sessions),
        "content_sessions": len(gateway.turns.asking.chain),
        "directory": _directory(gateway),
        "clients": len(gateway.clients),
        "live": state.live,
        "requests": {
            name: getattr(state.account, name)
            for name in ("received", "done", "rejected", "finished", "broken", "aborted")
        },
        "workers": [
            {
                "worker": worker.id,
                "up": worker.up,
                "requests": worker.requests,
                "pending_prefill_tokens": worker.pending_prefill_tokens,
                "held_tokens": worker.held_tokens,
                "sessions": worker.bound_sessions,
                "dp_rank": worker.dp_rank,
                "incarnation": worker.incarnation,
                "model": worker.profile.model or None,
                "queue_ms": round(worker.queue_ms, 3),
                "batch": worker.batch,
                "occupancy": round(worker.occupancy, 4),
                "profile": _profile(gateway, worker),
                "device_memory": device_memory(gateway.monitors[worker.id]),
                "connections_opened": gateway.turns.pools[worker.id].opened,
                "connections_reused": gateway.turns.pools[worker.id].reused,
                "connections_idle": gateway.turns.pools[worker.id].idle,
            }
            for worker in state.fleet
        ],
        "probes": {name: _probe(monitor) for name, monitor in gateway.monitors.items()},
        "never_up": [
            name for name in gateway.turns.pools if name not in {w.id for w in state.fleet}
        ],
        **counts(gateway),
    }


def _directory(gateway: Gateway) -> dict[str, Any] | None:
    """Return what the directory answered, and which workers own sessions there; None when no
    directory is asked."""
    if gateway.turns.finder is None:
        return None
    stated = {name: monitor.stated for name, monitor in gateway.monitors.items()}
    owning = [name for name, one in stated.items() if one and one.profile.owns_sessions]
    return {"answers": dict(gateway.turns.finder.answers), "workers_owning": owning}


def _probe(monitor: HealthMonitor) -> dict[str, Any]:
    """Return what the last probes of a worker found, also of one that never was up."""
    unlearnt = monitor.unlearnt
    return {
        "states_itself": monitor.stated is not None,
        "models": sorted(monitor.models),
        "assigned": monitor.address.models,
        "models_unknown": None if unlearnt is None else unlearnt.why,
        "problems": monitor.problems,
        "cause": monitor.cause,
    }


def _profile(gateway: Gateway, worker: Worker) -> dict[str, Any]:
    """Return what the worker is priced by, and what it says of itself."""
    profile, monitor = worker.profile, gateway.monitors[worker.id]
    speed, stated = worker.speed, monitor.stated
    return {
        "models": sorted(profile.names - {""}),
        "role": profile.role,
        "actions": sorted(profile.actions),
        "spec_digest": profile.spec_digest,
        "kv_bytes_total": profile.kv_bytes_total,
        "kv_bytes_per_token": speed.kv_bytes_per_token,
        "kv_bytes_per_sequence": speed.kv_bytes_per_sequence,
        "prefill_ms": msgspec.structs.astuple(speed.prefill),
        "step_ms": speed.step_ms,
        "step_ms_per_sequence": speed.step_ms_per_sequence,
        "is_measured": profile.is_measured,
        "stated": None if stated is None else stated.profile,
        "problems": monitor.problems,
    }


def decision(decided: Decided, now: float) -> dict[str, Any]:
    """Return one decision as JSON values; `age_s` is how long ago it was made."""
    at_s, request_id, identity, outcome = decided
    row: dict[str, Any] = {
        "age_s": round(now - at_s, 3),
        "request_id": request_id.decode("latin-1"),
        "session": identity.session if identity else None,
        "named_by": identity.source if identity else None,
        "parent": identity.parent if identity else None,
    }
    if isinstance(outcome, Dispatch):
        return row | {
            "worker": outcome.worker,
            "reason": outcome.reason,
            "attempt": outcome.attempt,
            "prefill_tokens": outcome.prefill_tokens,
            "prompt_tokens": outcome.prompt_tokens,
            "turn": outcome.turn,
            **_decision(outcome.decision),
        }
    return row | {"worker": None, "reason": outcome.refusal}


def _decision(decision: Decision) -> dict[str, Any]:
    source, prefill, wanted = decision.source, decision.prefill, decision.wanted
    return {
        "action": decision.action,
        "expected_cached_tokens": decision.cached_tokens,
        "prefill_worker": None if prefill is None else prefill.id,
        "source": None if source is None else _source(source),
        "wanted_migration": None
        if wanted is None
        else {"from": wanted.source.id, "to": wanted.target.id, "tokens": wanted.tokens},
        "priced": [
            {
                "action": option.action,
                "worker": option.worker.id,
                "total_ms": round(option.total_ms, 3),
                "cached_tokens": option.cached_tokens,
                "terms_ms": {name: round(ms, 3) for name, ms in option.terms().items()},
            }
            for option in decision.alternatives
        ],
    }


def _source(copy: Copy) -> dict[str, Any]:
    holder = "store" if copy.worker is None else copy.worker.id
    return {"worker": holder, "tier": copy.tier.name.lower(), "tokens": copy.tokens}


def admin_app(gateway: Gateway) -> Starlette:
    """Make the app of the live page, /health, /status, /decisions?last=N, /sessions?last=N,
    /metrics and /workers; status and decisions also stand below /ownerserve/."""
    registry = CollectorRegistry()
    registry.register(GatewayCollector(gateway))

    async def get_health(request: Request) -> Response:
        return _json({"workers_up": len(gateway.state.fleet.up)})

    async def get_status(request: Request) -> Response:
        return _json(status(gateway))

    async def get_decisions(request: Request) -> Response:
        last = _last(request)
        if last is None:
            return _no_count(request)
        kept = islice(reversed(gateway.turns.observer.decisions), last)
        return _json({"decisions": [decision(one, gateway.now()) for one in kept]})

    async def get_sessions(request: Request) -> Response:
        last = _last(request)
        if last is None:
            return _no_count(request)
        return _json(newest_sessions(gateway, last))

    async def get_metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/", get_page),
            Route("/health", get_health),
            Route("/status", get_status),
            Route("/decisions", get_decisions),
            Route("/sessions", get_sessions),
            Route("/ownerserve/status", get_status),
            Route("/ownerserve/decisions", get_decisions),
            Route("/metrics", get_metrics),
            *worker_routes(gateway),
        ]
    )


def _last(request: Request) -> int | None:
    """Return how many rows are asked for; None when what is said is no count."""
    last = request.query_params.get("last", "100")
    return int(last) if COUNT.fullmatch(last) else None


def _no_count(request: Request) -> Response:
    last = request.query_params["last"]
    return _json({"error": f"last: {last!r} is no count; write ?last=100"}, 400)


async def get_page(request: Request) -> Response:
    """Answer with the live page: it has no data in it, and asks for all of that itself."""
    return Response(PAGE.document, media_type="text/html", headers=PAGE.headers)


def _json(body: Any, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code, media_type="application/json")


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
        problem = "authorization: the admin port asks for its key; send `Bearer KEY`"
        answer = _json({"error": problem}, 401)
        answer.headers["www-authenticate"] = "Bearer"
        await answer(scope, receive, send)


def keyed_app(app: ASGIApp, key: str) -> ASGIApp:
    """Return `app` behind the key, but for the live page: a browser asks for that without one, and
    the page asks its reader for the key."""
    return Starlette(routes=[Route("/", get_page), Mount("", Keyed(app, key))])


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
    app: ASGIApp = admin_app(gateway)
    if config.admin_key is not None:
        app = keyed_app(app, config.admin_key)
    serving = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    return AdminServer(serving), listener
