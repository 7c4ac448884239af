"""A check says before a gateway starts whether it could serve: each worker is asked once, as at a
start, and the directory too. Nothing is opened, and no turn is sent.
"""

from __future__ import annotations

import asyncio

import msgspec

from ownerserve.directory.messages import DirectoryRefusal, FindSession, Refused
from ownerserve.directory.port import Directory
from ownerserve.gateway.config import Config
from ownerserve.gateway.service import Gateway
from ownerserve.gateway.workers.health import HealthMonitor
from ownerserve.kv.ids import SessionId
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


async def check(config: Config, directory: Directory | None) -> list[CheckFinding]:
    """Return what a gateway with this config would find. Raises InvalidInput for a config that it
    would refuse."""
    gateway = Gateway(config, directory)
    try:
        findings = await asyncio.gather(*map(_worker, gateway.monitors.values()))
        for monitor, finding in zip(gateway.monitors.values(), findings, strict=True):
            if finding.is_well:
                gateway.state.handle(WorkerUp(monitor.address.worker), gateway.now())
        found = [*findings, _policy(gateway)]
        if directory is not None:
            found.append(await _directory(directory))
        return found
    finally:
        await gateway.stop()


async def _worker(monitor: HealthMonitor) -> CheckFinding:
    """Ask a worker what it is; once more when it does not answer, as one bad answer says
    nothing."""
    about = f"worker {monitor.address.worker}"
    for _ in range(2):
        if any(isinstance(one, WorkerUp) for one in await monitor.probe()):
            kind = "a plain engine" if monitor.stated is None else "states itself"
            models = ", ".join(sorted(monitor.models)) or "any it is asked for"
            problems = "".join(f"; {problem}" for problem in monitor.problems)
            return CheckFinding(about, f"up, {kind}, models: {models}{problems}", not problems)
    return CheckFinding(about, monitor.cause or "no answer", is_well=False)


def _policy(gateway: Gateway) -> CheckFinding:
    about = f"policy {gateway.config.policy}"
    action = unmet(gateway.turns.policy, gateway.state.fleet.candidates(None))
    if action is None:
        return CheckFinding(about, "has what it needs", is_well=True)
    found = f"needs {action.value}, which no worker that answers offers"
    return CheckFinding(about, found, is_well=False)


async def _directory(directory: Directory) -> CheckFinding:
    loop = asyncio.get_running_loop()
    try:
        (outcome,) = await loop.run_in_executor(
            None, directory.execute, [FindSession(NOBODY, None)]
        )
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is what was found
        return CheckFinding("directory", f"fails: {type(error).__name__}: {error}", is_well=False)
    if outcome == Refused(DirectoryRefusal.UNREACHABLE):
        return CheckFinding("directory", "does not answer", is_well=False)
    return CheckFinding("directory", "answers", is_well=True)
