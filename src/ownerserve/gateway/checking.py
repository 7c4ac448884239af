"""A check says before a gateway starts whether it could serve: each worker is asked once, as at a
start, and the directory too. Nothing is opened, and no turn is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from ownerserve.directory.messages import DirectoryRefusal, FindSession, Refused
from ownerserve.directory.port import Directory
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.callers import KeyedCallers
from ownerserve.gateway.service import Gateway
from ownerserve.gateway.workers.health import HealthMonitor, News
from ownerserve.kv.ids import SessionId
from ownerserve.router.entry.terms import NO_TERMS
from ownerserve.router.messages import WorkerUp
from ownerserve.router.policies.apart import unmet

NOBODY = SessionId("0" * 32)
"""A session that does not exist, for whose owner the directory is asked."""


class CheckFinding(msgspec.Struct, frozen=True):
    """A finding is what was looked at, what was found, and whether a gateway could serve with
    it."""

    about: str
    found: str
    is_well: bool


def nothing_known() -> str:
    """Say nothing of why a directory does not answer."""
    return ""


async def check(
    config: Config, directory: Directory | None, why_silent: Callable[[], str] = nothing_known
) -> list[CheckFinding]:
    """Return what a gateway with this config would find; `why_silent` says why a directory does
    not answer. Raises InvalidInput for a config that it would refuse."""
    gateway = Gateway(config, directory)
    try:
        places = [] if not config.places else await _places(gateway)
        findings = []
        for finding, news in await asyncio.gather(*map(_worker, gateway.monitors.values())):
            findings.append(finding)
            for one in news:
                gateway.state.handle(one, gateway.now())
        found = [*places, *findings, _policy(gateway)]
        if config.tenants is not None:
            found.append(_tenants(config.tenants))
        if directory is not None:
            found.append(await _directory(directory, why_silent))
        return found
    finally:
        await gateway.stop()


def _tenants(callers: KeyedCallers) -> CheckFinding:
    """Say who is let in, and on which terms that are not everybody's. A file in which something is
    wrong never comes so far."""
    said = []
    for name, caller in sorted(callers.tenants.items()):
        terms, told = caller.terms, []
        if terms.weight != NO_TERMS.weight:
            told.append(f"weight {terms.weight:g}")
        if terms.is_batch:
            told.append("batch")
        if terms.requests_per_minute is not None:
            told.append(f"{terms.requests_per_minute:g} requests a minute")
        if terms.tokens_per_minute is not None:
            told.append(f"{terms.tokens_per_minute:,.0f} tokens a minute")
        said.append(f"{name} ({', '.join(told)})" if told else name)
    return CheckFinding("tenants", ", ".join(said), is_well=True)


async def _places(gateway: Gateway) -> list[CheckFinding]:
    """Ask where workers are found; whom they name joins, and is asked like all others."""
    discovery = gateway.discovery
    await discovery.begin()
    return [
        CheckFinding(
            name,
            discovery.causes.get(name) or f"names {count} worker{'' if count == 1 else 's'}",
            is_well=name not in discovery.causes and count > 0,
        )
        for name, count in discovery.named().items()
    ]


async def _worker(monitor: HealthMonitor) -> tuple[CheckFinding, list[News]]:
    """Ask a worker what it is, and return with the finding what it says of itself; once more when
    it does not answer, as one bad answer says nothing."""
    about = f"worker {monitor.address.worker}"
    for _ in range(2):
        news = await monitor.probe()
        if any(isinstance(one, WorkerUp) for one in news):
            kind = "a plain engine" if monitor.stated is None else "states itself"
            models = ", ".join(sorted(monitor.models)) or "any it is asked for"
            problems = "".join(f"; {problem}" for problem in monitor.problems)
            role = "" if monitor.address.role is None else f", role: {monitor.address.role.value}"
            found = f"up, {kind}{role}, models: {models}{problems}"
            return CheckFinding(about, found, not problems), news
    return CheckFinding(about, monitor.cause or "no answer", is_well=False), []


def _policy(gateway: Gateway) -> CheckFinding:
    about = f"policy {gateway.turns.rollout.choice.live_policy}"
    action = unmet(gateway.turns.rollout.steering.policy, gateway.state.fleet.candidates(None))
    if action is None:
        return CheckFinding(about, "has what it needs", is_well=True)
    found = f"needs {action.value}, which no worker that answers offers"
    return CheckFinding(about, found, is_well=False)


async def _directory(directory: Directory, why_silent: Callable[[], str]) -> CheckFinding:
    loop = asyncio.get_running_loop()
    try:
        (outcome,) = await loop.run_in_executor(
            None, directory.execute, [FindSession(NOBODY, None)]
        )
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is what was found
        return CheckFinding("directory", f"fails: {type(error).__name__}: {error}", is_well=False)
    if outcome == Refused(DirectoryRefusal.UNREACHABLE):
        why = await loop.run_in_executor(None, why_silent)
        said = f"does not answer: {why}" if why else "does not answer"
        return CheckFinding("directory", said, is_well=False)
    return CheckFinding("directory", "answers", is_well=True)
