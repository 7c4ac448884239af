"""The health monitor probes each worker from time to time and tells the state whether it is up, in
which life, and what it is.

A worker of ours answers `/ownerserve/status` with all of it (kv.wire.status), which is read on
every probe: prices follow what the worker measures. Any other engine is asked for `/health`, and
once a life for `/v1/models`. A worker is up with its first good answer, and down after two bad
ones in a row; when nobody listens at its port any more, at once.

Owns counts, the last statement, and what was wrong with it: a statement that can't be read costs a
warning, never a worker. How soon it answers is looked at by the way (pace.py): that is told, and
takes no worker out.

Owns too what stands in for a part that a statement leaves out (`profile_of`, pure).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Access, Address
from ownerserve.gateway.http.door import is_ours
from ownerserve.gateway.http.fetching import fetch
from ownerserve.gateway.http.heads import read_response_head
from ownerserve.gateway.http.model_list import Models, Unlearnt, read_models, stated_models
from ownerserve.gateway.stamps import MODEL, read_stamp
from ownerserve.gateway.workers.components import ComponentMemory, read_components
from ownerserve.gateway.workers.pace import Pace, ProbeWatch
from ownerserve.kv.ids import Incarnation
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.kv.wire.status import (
    ProfileStatement,
    SpeedStatement,
    StatusRead,
    TierStatement,
    WorkerLoad,
    WorkerStatus,
    load_of,
    read_status,
)
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.router.messages import Down, Stamped, WorkerDown, WorkerUp
from ownerserve.router.worker import EVERY_ENGINE, LENT_TIERS, Profile, Speed, WorkerRole


def profile_of(status: WorkerStatus, *, default: Speed) -> tuple[Profile, tuple[str, ...]]:
    """Return the router's profile of a worker, but for its models, and what of its statement was
    not understood. `default` prices what it does not state."""
    stated = status.profile
    problems: list[str] = []
    profile = Profile(
        spec_digest=stated.spec_digest,
        role=_role(stated.role, problems),
        speed=_speed(stated, default),
        actions=_actions(stated.actions),
        kv_bytes_total=status.load.kv_bytes_total,
        tier_bytes=_tier_bytes(stated.tiers),
        are_tokens_sized=bool(stated.kv_bytes_per_token or stated.kv_bytes_per_sequence),
        sequence_tokens=stated.sequence_tokens,
        is_prefill_measured=stated.speed is not None
        and stated.speed.prefill_measured_s is not None,
        lends=_lends(stated.lends),
        are_steps_measured=stated.speed is not None and stated.speed.step_measured_s is not None,
        frees_prompts=stated.frees_prompts,
    )
    return profile, tuple(problems)


def _role(stated: str, problems: list[str]) -> WorkerRole:
    try:
        return WorkerRole(stated)
    except ValueError:
        problems.append(f"profile.role: {stated!r}")
        return WorkerRole.HYBRID


def _actions(stated: Sequence[str] | None) -> frozenset[PlacementAction]:
    """Return the actions that are known here of those stated; words of a later version are none,
    and who says none can do what any engine can."""
    known = {action.value for action in PlacementAction}
    actions = frozenset(PlacementAction(word) for word in stated or () if word in known)
    return actions or EVERY_ENGINE


def _lends(stated: Sequence[str] | None) -> frozenset[Tier]:
    """Return the tiers that are known here of those from which others may read."""
    if stated is None:
        return LENT_TIERS
    return frozenset(Tier(word) for word in stated if word in _TIERS)


def _tier_bytes(stated: Sequence[TierStatement]) -> dict[Tier, int]:
    """Return what the tiers that are a worker's own keep; a shared store is nobody's own."""
    own = [one for one in stated if one.name in _OWN_TIERS]
    return {Tier(one.name): one.bytes_total for one in own if one.bytes_total}


def _speed(stated: ProfileStatement, default: Speed) -> Speed:
    media = dict(default.media)
    for tier in stated.tiers:
        if tier.name in _TIERS:
            media[Tier(tier.name)] = _medium(tier)
    token_bytes = stated.kv_bytes_per_token
    if not token_bytes and not stated.kv_bytes_per_sequence:  # else it is purely recurrent
        token_bytes = default.kv_bytes_per_token
    speed = replace(
        default,
        media=media,
        kv_bytes_per_token=token_bytes,
        kv_bytes_per_sequence=stated.kv_bytes_per_sequence,
    )
    return speed if stated.speed is None else _at(speed, stated.speed)


_TIERS = frozenset(tier.value for tier in Tier)
_OWN_TIERS = frozenset((Tier.HOST.value, Tier.DISK.value))


def _medium(tier: TierStatement) -> Medium:
    return Medium(tier.latency_ms, tier.bytes_per_ms)


def _at(speed: Speed, stated: SpeedStatement) -> Speed:
    """Return `speed` with the computing times that are stated."""
    prefill = Coefficients(
        stated.prefill_pass_ms, stated.prefill_token_ms, stated.prefill_attention_ms
    )
    return replace(
        speed,
        prefill=prefill,
        step_ms=stated.step_ms,
        step_ms_per_sequence=stated.step_ms_per_sequence,
        replay_tokens=stated.replay_tokens,
    )


log = logging.getLogger("ownerserve.gateway")

BAD_ANSWERS_UNTIL_DOWN = 2
STATUS_PATH = b"/ownerserve/status"

News = WorkerUp | WorkerDown | Stamped


class _Up(msgspec.Struct, frozen=True):
    """This is what one good answer says of its worker; `models` by name, none: they are to be asked
    for."""

    rank: int
    life: Incarnation | None
    profile: Profile
    load: WorkerLoad | None
    models: Models
    is_leaving: bool = False


class HealthMonitor:
    """A monitor probes one worker, and tells what it finds."""

    def __init__(
        self,
        address: Address,
        config: Config,
        *,
        access: Access,
        tell: Callable[[News | Pace], None],
    ) -> None:
        self.address = address
        self.problems: tuple[str, ...] = ()
        """What was wrong with the last statement; empty when nothing was."""
        self.problem_counts: Counter[str] = Counter()
        """Statements of which something was refused, by field."""
        self.stated: WorkerStatus | None = None
        """The last statement; None of an engine that makes none."""
        self.components: tuple[ComponentMemory, ...] = ()
        """Its device memory by component, by its last statement; empty: it tells none."""
        self.models: Models = {}
        """What it serves; empty: not known, or whatever it is asked for."""
        self.unlearnt: Unlearnt | None = None
        """Why its models could not be learnt: it gets no turn."""
        self.cause = ""
        """What was wrong with its last answer to a probe."""
        self._config = config
        self._access = access
        self._tell = tell
        self._watch = ProbeWatch(address.worker, config.health_slow_s, tell)
        self._bad = 0
        self._states_itself = True
        """Until it has answered 404: asked again after it was down."""
        self._life: Incarnation | None = None
        self._rank: int | None = None
        """The rank that was said last: an address is one process, and so one rank."""
        self._has_listed = False

    @property
    def is_slow(self) -> bool:
        """Whether its probes are answered late, or the present one is not answered so far."""
        return self._watch.is_slow

    async def run(self) -> None:
        """Probe until cancelled, the first time after one interval, and tell the news."""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            news = await self.probe()
            try:
                for one in news:
                    self._tell(one)
            except Exception:  # a task's root: a worker that nobody looks after would stay up
                log.exception("worker %s: its news could not be taken in", self.address.worker)

    async def probe(self) -> list[News]:
        """Ask once and return the news; none after a first bad answer, which says nothing yet, and
        none where the gateway itself could not ask."""
        worker = self.address.worker
        self._watch.asked()
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                up = await self._by_status() or await self._by_health()
            self._watch.answered()
            if up is not None:
                self._bad = 0
                return await self._as_learnt(up)
            self.cause = "/health says that it is not well"
        except ConnectionRefusedError as error:
            self.cause = f"nobody listens there: {error}"
            self._bad = BAD_ANSWERS_UNTIL_DOWN
            self._forget()
            return [WorkerDown(worker, Down.UNREACHABLE)]
        except ssl.SSLError as error:
            self.cause = f"tls: {error.reason or error}"
            if isinstance(error, ssl.SSLCertVerificationError):
                self.cause += f": {error.verify_message}"
            self._note((self.cause,))
        except TimeoutError:
            self.cause = f"no answer in {self._config.health_timeout_s:g} s"
        except OSError as error:
            if is_ours(error):
                return []
            self.cause = f"{type(error).__name__}: {error}"
        except Exception:  # a task's root: what can't be read is a bad answer, and it is probed on
            log.exception("worker %s: its answer to a probe ended in a fault", worker)
            self.cause = "its answer can't be read"
        finally:
            self._watch.given_up()
        self._bad += 1
        if self._bad < BAD_ANSWERS_UNTIL_DOWN:
            return []
        self._forget()
        return [WorkerDown(worker, Down.UNHEALTHY)]

    async def _by_status(self) -> _Up | None:
        """Read the worker's own statement; None when it makes none that can be read."""
        if not self._states_itself:
            return None
        answer = await fetch(self.address, STATUS_PATH, self._access)
        if not answer.is_good:
            self._states_itself = answer.status != 404
            self.stated, self.components = None, ()
            return None
        self.components = read_components(answer.body)
        return self._read(read_status(answer.body))

    def _read(self, read: StatusRead) -> _Up | None:
        self.stated = status = read.status
        if status is None:
            self._note(read.problems)
            return None
        worker, stated = self.address.worker, status.profile
        profile, problems = profile_of(status, default=self._config.speed)
        self._note((*read.problems, *problems))
        load = load_of(status.unit, status.load, worker=worker)
        life = load.unit.incarnation or None
        models = stated_models(stated.models, stated.sequence_tokens)
        told = None if life is None else load
        return _Up(load.unit.dp_rank, life, profile, told, models, stated.leaving)

    async def _by_health(self) -> _Up | None:
        """Ask `/health`, which a worker of ours stamps; None when the worker is not well."""
        answer = await fetch(self.address, b"/health", self._access)
        if not answer.is_good:
            return None
        headers = read_response_head(answer.status, b"", answer.headers).stamp
        stamp = read_stamp(self.address.worker, headers, self.problem_counts)
        total = 0 if stamp.status is None else stamp.status.kv_bytes_total
        profile = Profile(speed=self._config.speed, kv_bytes_total=total)
        told = headers.get(MODEL)
        models = stated_models(() if told is None else (told.decode("latin-1"),), 0)
        if stamp.unit is None:
            return _Up(self._rank or 0, None, profile, None, models)
        return _Up(stamp.unit.dp_rank, stamp.unit.incarnation, profile, stamp.status, models)

    async def _as_learnt(self, up: _Up) -> list[News]:
        """Return the news of a worker that is well, once it is known which models it serves."""
        worker, assigned = self.address.worker, self.address.models
        if assigned:
            self.models = {**stated_models(assigned, 0), **_of(up.models, assigned)}
        elif up.models:
            self.models = up.models
        elif not self._has_listed or up.life != self._life:
            await self._list()
        self._life = up.life
        if self.unlearnt is not None and not (assigned or up.models):
            self.cause = self.unlearnt.why
            return [WorkerDown(worker, Down.MODELS_UNKNOWN)]
        self.unlearnt = None
        names = assigned or tuple(self.models) or ("",)
        profile = replace(up.profile, model=names[0], adapters=frozenset(names[1:]))
        profile = in_role(profile, self.address.role)
        news: list[News] = []
        if self._rank not in (None, up.rank):
            self.cause = f"rank {self._rank} is rank {up.rank} now"
            news.append(WorkerDown(worker, Down.ANOTHER_RANK))
        self._rank = up.rank
        if up.is_leaving:
            self.cause = "it says that it leaves"
            news.append(WorkerDown(worker, Down.DRAINED))
        else:
            news.append(WorkerUp(worker, up.rank, up.life, profile))
        if up.load is not None:
            news.append(Stamped(up.load))
        return news

    async def _list(self) -> None:
        """Ask the engine which models it serves. A list that does not come is no sign that it is
        not well."""
        found: Models | Unlearnt
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                found = read_models(await fetch(self.address, b"/v1/models", self._access))
        except TimeoutError:
            found = Unlearnt(f"/v1/models: no answer in {self._config.health_timeout_s:g} s")
        except OSError as error:
            if is_ours(error):
                raise
            found = Unlearnt(f"/v1/models: {error}")
        self._has_listed = not isinstance(found, Unlearnt)
        if not isinstance(found, Unlearnt):
            self.models, self.unlearnt = found, None
            return
        self.problem_counts["models"] += 1
        if self.unlearnt != found:
            log.warning(
                "worker %s gets no turns: %s, or assign its models: --worker %s=MODEL",
                self.address.worker,
                found.why,
                self.address.url,
            )
        self.models, self.unlearnt = {}, found

    def _note(self, problems: tuple[str, ...]) -> None:
        """Count what was wrong with a statement, and log it when it is something new."""
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
        """Forget what the worker was, as it is down: that says nothing of what comes back."""
        self.stated = self.unlearnt = None
        self.components = ()
        self._rank = None
        self._has_listed = False
        self._states_itself = True
        self.problems = ()


def in_role(profile: Profile, role: WorkerRole | None) -> Profile:
    """Return the profile in the role that the operator gives the worker, who vouches with it that
    its engine can be sent state; None: as it is."""
    if role is None:
        return profile
    actions = profile.actions | {PlacementAction.REMOTE_PREFILL}
    return replace(profile, role=role, actions=actions)


def _of(models: Models, names: Sequence[str]) -> Models:
    return {name: said for name, said in models.items() if name in names}
