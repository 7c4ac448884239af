"""A soak: a directory, two workers with stores and a gateway under agents for a time, with a fault
drawn every few seconds, and what has to hold at its end."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ownerserve.directory.rpc.client import DirectoryClient
from tests.support.children import importing
from tests.support.kills.processes import Fleet, Member, metric
from tests.support.soak.agents import Agents, Cold
from tests.support.soak.sizes import FEWEST, FLEETING, Grown, Sizes, grown, sample
from tests.support.waits import until

AGENTS = 3
QUIET_S = (1.0, 4.0)
"""Between a fault that is over and the next."""
FROZEN_S = (0.2, 4.0)
"""At most twice a lease."""
REST_S = 120.0
ENOUGH_S = 600.0
"""On a busy machine a short run goes on for so long at most, until it has samples enough."""
SCHEMA = "ownerserve.soak/1"


class Soaked(NamedTuple):
    """What came of a soak; `failures` empty: all held."""

    seconds: float
    turns: Counter[str]
    faults: Counter[str]
    samples: list[Sizes]
    failures: list[str]

    def as_json(self, seed: int) -> dict[str, Any]:
        """The report, with each size at the first and at the last sample."""
        ends = (self.samples[0], self.samples[-1]) if self.samples else ({}, {})
        return {
            "schema": SCHEMA,
            "seed": seed,
            "seconds": round(self.seconds, 1),
            "turns": dict(self.turns),
            "faults": dict(self.faults),
            "samples": len(self.samples),
            "sizes": {
                f"{place.member}.{place.kind}": {"first": ends[0][place], "last": ends[1][place]}
                for place in sorted(ends[0])
            },
            "failures": self.failures,
        }


def soak(folder: Path, seconds: float, *, seed: int, tell: Callable[[str], None]) -> Soaked:
    """Soak for so many seconds of faults or, without a wrong answer, until there are samples enough
    to say anything; then check. `tell` hears a line of progress at a time."""
    fleet = Fleet(folder, policy="ownerserve")
    chance = random.Random(seed)
    faults: Counter[str] = Counter()
    samples: list[Sizes] = []
    try:
        fleet.begin()
        with Cold(folder) as cold:
            agents = Agents(fleet, cold.answer, agents=AGENTS, seed=seed)
            agents.begin()
            try:
                began_s = time.monotonic()
                while (past_s := time.monotonic() - began_s) < seconds or (
                    len(samples) < FEWEST and not agents.wrong and past_s < seconds + ENOUGH_S
                ):
                    time.sleep(chance.uniform(*QUIET_S))
                    agents.check()
                    faults[strike(fleet, chance)] += 1
                    served(agents)
                    if (seen := sampled(fleet, folder)) is not None:
                        samples.append(seen)
                    tell(
                        f"{time.monotonic() - began_s:5.0f} s: {agents.counts['answered']} turns,"
                        f" {faults.total()} faults, {len(agents.wrong)} wrong"
                    )
            finally:
                fleet.mend()
                agents.stop()
            spent_s = time.monotonic() - began_s
            failures = [*agents.wrong, *at_the_end(fleet, faults.total())]
    finally:
        fleet.close()
    failures += [str(one) for one in trend(samples)]
    failures += [said for worker in fleet.workers for said in unsound(folder / worker.name)]
    return Soaked(spent_s, agents.counts, faults, samples, failures)


def strike(fleet: Fleet, chance: random.Random) -> str:
    """One member is killed, asked to stop, or frozen for a while; then all live again."""
    member = chance.choice([*fleet.members.values()])
    fault = chance.choice([killed, restarted, frozen])
    fault(member, chance)
    fleet.mend()
    return f"{fault.__name__} {member.name}"


def killed(member: Member, _chance: random.Random) -> None:
    member.kill()


def restarted(member: Member, _chance: random.Random) -> None:
    member.terminate()


def frozen(member: Member, chance: random.Random) -> None:
    member.freeze()
    time.sleep(chance.uniform(*FROZEN_S))
    member.thaw()


def served(agents: Agents) -> None:
    """Wait until turns are answered again after a fault."""
    before = agents.counts["answered"]

    def is_answered() -> bool:
        agents.check()
        return agents.counts["answered"] >= before + AGENTS

    until(is_answered, within_s=REST_S, what="a turn after a fault")


def sampled(fleet: Fleet, folder: Path) -> Sizes | None:
    """The sizes now; None where one does not say its own yet."""
    try:
        return sample(fleet, folder)
    except FLEETING:
        return None


def at_the_end(fleet: Fleet, faults: int) -> list[str]:
    """What does not hold of a fleet that nobody asks anything: no request is anywhere, no check
    failed in any life, and of the sessions, which all have ended, those alone are known whose end a
    fault took along: at most one an agent and fault."""
    failures = fleet.violations()
    left_most = AGENTS * (faults + 1)
    checks: dict[str, Callable[[], bool]] = {
        "a request neither ended nor was refused (invariant 3)": fleet.at_rest,
        f"more than {left_most} sessions stay known": lambda: sessions_known(fleet) <= left_most,
    }
    for what, holds in checks.items():
        try:
            until(holds, within_s=REST_S)
        except AssertionError:
            failures.append(what)
    return failures


def sessions_known(fleet: Fleet) -> float:
    """How many sessions the directory has a record of, or the gateway, whichever are more."""
    client = DirectoryClient(fleet.directory)
    try:
        records = client.status().records
    finally:
        client.close()
    assert records is not None, "an embedded directory counts its records"
    return max(records.sessions, metric(fleet.admins[0], "ownerserve_gateway_sessions"))


def trend(samples: list[Sizes]) -> list[Grown | str]:
    """What grew; that nothing can be said is a failure too."""
    try:
        return [*grown(samples)]
    except ValueError as error:
        return [str(error)]


def unsound(store: Path) -> list[str]:
    """What a closed store's own check finds wrong."""
    command = [sys.executable, "-m", "ownerserve.cli.main", "store", "verify", str(store)]
    told = subprocess.run(command, env=importing(), text=True, capture_output=True, check=False)
    return [] if told.returncode == 0 else [f"{store.name}: {told.stdout}{told.stderr}"]
