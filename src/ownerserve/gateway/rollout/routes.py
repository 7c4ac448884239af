"""The rollout endpoints of the admin port let an operator see and change who decides, while turns
run.

    GET  /rollout                   who decides, and what was counted of shadows and arms
    PUT  /mode     {"mode": "bypass"}                        normal, shadow or bypass
    PUT  /shadow   {"policy": "ear"}                         null: nobody
    PUT  /canary   {"share": 0.05, "policy": "ear"}          what is left out stays
    PUT  /workers/ID/arm  {"arm": "main"}                    whose sessions run there
    POST /reload                                             read the files again, as SIGHUP does

Nothing is written to a file: a restart begins with the file's again, a reload changes what the file
says anew.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict, replace

from ownerserve.gateway.admin_api.answers import (
    AdminAnswer,
    ArmSums,
    CachedTokens,
    ReloadAnswer,
    RolloutAnswer,
    ShadowSums,
    WorkerRow,
)
from ownerserve.gateway.admin_api.endpoints import Asked, Endpoint, Run
from ownerserve.gateway.rollout.choice import RolloutChoice
from ownerserve.gateway.rollout.choosing import choose
from ownerserve.gateway.worker_admin import OF_A_WORKER, roster_problems, worker_row
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import WorkerId
from ownerserve.router.messages import Arm
from ownerserve.router.rollout.steering import Mode

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway

_ALL_SETTINGS = ("settings",)
"""Fields of a choice that are told elsewhere."""


class NewMode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new mode says who decides at all."""

    mode: Mode


class NewShadow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new shadow is the policy that decides beside; null: nobody."""

    policy: str | None


class NewArm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new arm says whose sessions run at a worker."""

    arm: Arm


class NewCanary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The canary's share and policy; what is left out stays."""

    share: float | msgspec.UnsetType = msgspec.UNSET
    policy: str | msgspec.UnsetType | None = msgspec.UNSET


def rollout_answer(gateway: Gateway) -> RolloutAnswer:
    """Return who decides, and what was counted."""
    rollout = gateway.turns.rollout
    choice = rollout.choice
    said = {name: value for name, value in asdict(choice).items() if name not in _ALL_SETTINGS}
    return RolloutAnswer(
        **said,
        decides=choice.live_policy,
        beside=choice.shadowed_by,
        canary_workers=sorted(rollout.canary_workers),
        shadows={
            name: ShadowSums(
                compared=counts.compared,
                agreed=counts.agreed.total(),
                regret_ms=round(sum(counts.regret_ms.values()), 3),
                gain_ms=round(sum(counts.gain_ms.values()), 3),
                expected_cached_tokens=CachedTokens(
                    live=counts.live_cached_tokens, shadow=counts.shadow_cached_tokens
                ),
            )
            for name, counts in rollout.shadows.items()
        },
        arms={
            arm: ArmSums(ends=dict(book.ends), tokens=book.tokens, displaced=book.displaced)
            for arm, book in rollout.books.items()
        },
    )


def rollout_endpoints(gateway: Gateway) -> list[Endpoint]:
    """Return the endpoints; who may ask is the admin port's to say."""

    async def get_rollout(asked: Asked) -> AdminAnswer:
        return rollout_answer(gateway)

    async def put_mode(asked: Asked) -> AdminAnswer:
        return _choose(replace(gateway.turns.rollout.choice, mode=asked.body.mode))

    async def put_shadow(asked: Asked) -> AdminAnswer:
        return _choose(replace(gateway.turns.rollout.choice, shadow=asked.body.policy))

    async def put_canary(asked: Asked) -> AdminAnswer:
        said = {"canary_share": asked.body.share, "canary_policy": asked.body.policy}
        changes = {name: value for name, value in said.items() if value is not msgspec.UNSET}
        return _choose(replace(gateway.turns.rollout.choice, **changes))

    def _choose(choice: RolloutChoice) -> RolloutAnswer:
        choose(gateway, choice)
        return rollout_answer(gateway)

    def put(path: str, summary: str, run: Run, **takes: type[msgspec.Struct] | str) -> Endpoint:
        return replace(get, method="PUT", path=path, summary=summary, run=run, **takes)

    get = Endpoint(
        method="GET",
        path="/rollout",
        summary="Who decides, and what was counted",
        answer=RolloutAnswer,
        run=get_rollout,
    )
    mode, mode_said = "Change who decides at all", '{"mode": "normal"}, shadow or bypass'
    shadow, shadow_said = "Change who decides beside", '{"policy": "ear"}, or null'
    canary, canary_said = "Change the canary", '{"share": 0.05, "policy": "ear"}'
    return [
        get,
        put("/mode", mode, put_mode, takes=NewMode, example=mode_said),
        put("/shadow", shadow, put_shadow, takes=NewShadow, example=shadow_said),
        put("/canary", canary, put_canary, takes=NewCanary, example=canary_said),
        *_arm_and_reload(gateway),
    ]


def _arm_and_reload(gateway: Gateway) -> list[Endpoint]:
    async def put_arm(asked: Asked) -> AdminAnswer:
        worker = WorkerId(asked.worker)
        gateway.roster.assign(worker, asked.body.arm)
        return worker_row(gateway, worker)

    async def post_reload(asked: Asked) -> AdminAnswer:
        if gateway.reloading is None:
            raise InvalidInput("reload", "there is nothing to read again", "start it by a command")
        reloaded = await gateway.reloading.reload()
        return ReloadAnswer(changed=reloaded.changed, stays=reloaded.stays)

    arm = Endpoint(
        method="PUT",
        path="/workers/{worker:path}/arm",
        summary="Say whose sessions run at a worker",
        answer=WorkerRow,
        takes=NewArm,
        example='{"arm": "canary"}, or main',
        problems=OF_A_WORKER,
        run=roster_problems(put_arm),
    )
    reload = Endpoint(
        method="POST",
        path="/reload",
        summary="Read the files again, as SIGHUP does",
        answer=ReloadAnswer,
        problems=(HTTPStatus.BAD_REQUEST,),
        run=post_reload,
    )
    return [arm, reload]
