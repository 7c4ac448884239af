"""A reload reads a gateway's files again and takes up what can change while turns run.

    read ── InvalidInput ──> told: file, key, mend; nothing is changed
      └─ settings ── checked whole ──> what the files say anew is done, live
                                  └──> what can't change live is named, and stays

Compared is what the files say now with what they said last: what an operator changed on the admin
port since stays so, unless the files say something new of that very thing. A change is made of a
whole file or not at all, and between two turns: none is lost, and one that runs goes on as it was
decided.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ownerserve.gateway.config import Config, PrefillLegs, StreamUsage
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.logs import AccessLog, tell
from ownerserve.gateway.receipts import receipts_of
from ownerserve.gateway.rollout.choosing import choose
from ownerserve.gateway.roster import RosterRefused, Stay
from ownerserve.kv.errors import InvalidInput

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway

_CHOICE = {
    "policy": "policy",
    "mode": "mode",
    "shadow": "shadow",
    "canary_policy": "canary-policy",
    "canary_share": "canary-share",
    "settings": "hot-ms, cool-s, long-tokens",
}
"""Settings of who decides, with their options."""
LIVE = _CHOICE | {
    "workers": "worker",
    "tenants": "tenants-file",
    "receipts": "receipts",
    "access_log": "access-log",
    "bodies_max_bytes": "body-memory-mib",
    "first_byte_timeout_s": "first-byte-timeout",
    "whole_answer_timeout_s": "whole-answer-timeout",
    "drain_notice_s": "drain-notice",
    "drain_timeout_s": "drain-timeout",
    "hedge_after_s": "hedge-after",
    "carry_on": "carry-on",
    "prefill_legs": "prefill-legs",
    "stream_usage": "stream-usage",
    "wait_comments_s": "wait-comments",
}
"""Settings that a reload changes, with their options."""
_FIXED = {
    "places": "worker-dns, worker-kubernetes",
    "discovery_latest_s": "discovery-interval",
    "unix": "listen",
    "unix_mode": "listen-mode",
    "tls": "tls-cert-file",
    "admin_tls": "admin-tls-cert-file",
    "admin_key": "admin-key-file",
    "opening_s": "opening",
    "queue": "max-running, max-waiting, queue-wait",
    "speed": "prefill-ms",
    "worker_key": "worker-key-file",
    "fleet_key": "curve-key-file",
}
"""The options of other settings, where they are not called as they are."""


class ReadSettings(msgspec.Struct, frozen=True):
    """These settings are what the options and files said at one reading. `beside`: options that are
    no setting of the gateway's own, by name."""

    config: Config
    log_level: str
    beside: dict[str, Any]


class Reloaded(msgspec.Struct, frozen=True):
    """A reload's outcome: the options that changed, and those that the files say otherwise now and
    that stay as they are until a restart."""

    changed: tuple[str, ...]
    stays: tuple[str, ...]


class Reloading:
    """The reloading of one gateway. `read` reads all anew, and raises InvalidInput; it may block:
    a thread does it."""

    def __init__(
        self, gateway: Gateway, first: ReadSettings, read: Callable[[], ReadSettings]
    ) -> None:
        self._gateway = gateway
        self._last = first
        self._read = read
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> Reloaded:
        """Read all anew and take up what can change. Raises InvalidInput, with nothing changed."""
        async with self._one_at_a_time:
            try:
                read = await asyncio.to_thread(self._read)
                self._check(read.config)
            except InvalidInput as error:
                tell(
                    logging.ERROR, "reload_refused", field=error.field, problem=error.problem,
                    mend=error.mend,
                )  # fmt: skip
                raise
            reloaded = await self._take_up(read)
            tell(
                logging.INFO, "reloaded", changed=", ".join(reloaded.changed) or None,
                stays=", ".join(reloaded.stays) or None,
            )  # fmt: skip
            return reloaded

    def _check(self, config: Config) -> None:
        """Raise InvalidInput for settings that no gateway would start with, or that can't follow
        the present ones."""
        config.check()
        if (config.tenants is None) is not (self._last.config.tenants is None):
            problem = "is given now, or no more: who is let in would change under open connections"
            raise InvalidInput("tenants-file", problem, "restart the gateway for that")

    async def _take_up(self, read: ReadSettings) -> Reloaded:
        last, self._last = self._last, read
        old, new = last.config, read.config
        names = [name for name in Config.__struct_fields__ if _is_other(old, new, name)]
        changed = [LIVE[name] for name in names if name in LIVE]
        stays = [_FIXED.get(name, name.replace("_", "-")) for name in names if name not in LIVE]
        if last.log_level != read.log_level:
            logging.getLogger("ownerserve").setLevel(read.log_level.upper())
            changed.append("log-level")
        stays += [name for name in read.beside if read.beside[name] != last.beside[name]]
        # As long as it is not taken up, it differs from what is so: it is named each time.
        fixed = {name: getattr(old, name) for name in names if name not in LIVE}
        self._last = replace(read, config=replace(new, **fixed), beside=last.beside)
        self._set(self._last.config, {name: getattr(new, name) for name in names if name in LIVE})
        if "workers" in names:
            followed = await _follow(self._gateway, old.workers, new.workers)
            stays += followed.stays
            taken = replace(self._last.config, workers=followed.taken)
            self._last = replace(self._last, config=taken)
        return Reloaded(tuple(changed), tuple(stays))

    def _set(self, config: Config, said: dict[str, Any]) -> None:
        """Take up the settings in `said`, which `config` has too."""
        gateway = self._gateway
        turns, gateway.config = gateway.turns, config
        if config.tenants is not None and "tenants" in said:
            gateway.callers.now = config.tenants
            gateway.limits.known.forget()
        turns.first_byte_timeout_s = config.first_byte_timeout_s
        turns.whole_answer_timeout_s = config.whole_answer_timeout_s
        turns.comments.every_s = config.wait_comments_s
        gateway.legs.prompt_patience_s = config.first_byte_timeout_s
        gateway.legs.hedge_after_s = config.hedge_after_s
        gateway.legs.carries_on = config.carry_on
        gateway.legs.sends_ahead = config.prefill_legs is PrefillLegs.BOTH
        gateway.legs.asks_usage = config.stream_usage is StreamUsage.ASK
        gateway.bodies.max_bytes = config.bodies_max_bytes
        if "receipts" in said:
            turns.receipts = receipts_of(config.receipts)
        if "access_log" in said:
            turns.access_log = AccessLog() if config.access_log else None
        if said.keys() & _CHOICE.keys():
            choice = {name: said[name] for name in said.keys() & _CHOICE.keys()}
            choose(gateway, replace(turns.rollout.choice, **choice))


def _is_other(old: Config, new: Config, name: str) -> bool:
    return bool(getattr(old, name) != getattr(new, name))


class _Followed(msgspec.Struct, frozen=True):
    """A followed list of workers: those that are as it says now, and what of it can't be."""

    taken: tuple[Address, ...]
    stays: list[str]


async def _follow(
    gateway: Gateway, old: tuple[Address, ...], new: tuple[Address, ...]
) -> _Followed:
    """Have workers join and leave as the settings say now; whom discovery names as well stays."""
    roster, discovery = gateway.roster, gateway.discovery
    stays: list[str] = []
    taken: list[Address] = []
    joining: list[Address] = []
    before, now = ({one.worker: one for one in many} for many in (old, new))
    for worker in before.keys() - now.keys():
        is_here = worker in roster.monitors and roster.stay(worker) is not Stay.LEAVING
        if is_here and not discovery.unlisted(worker):
            roster.leave(worker)
    for worker in now.keys() - before.keys():
        discovery.listed(worker)
    for worker, address in now.items():
        known = roster.monitors.get(worker)
        if known is None:
            joining.append(address)
        elif roster.stay(worker) is Stay.LEAVING:
            stays.append(f"worker {worker}: its turns have not ended; reload when it has left")
            continue
        elif address != before.get(worker):
            roster.assign(worker, address.arm)
            if known.address != address:
                stays.append(f"worker {worker}: let it leave and join for what is new beside arm")
                address = known.address
        taken.append(address)
    joined = await asyncio.gather(*map(roster.join, joining), return_exceptions=True)
    for address, outcome in zip(joining, joined, strict=True):
        if isinstance(outcome, RosterRefused):
            stays.append(f"worker {address.worker}: {outcome}")
        elif outcome is not None:
            raise outcome
    return _Followed(tuple(taken), stays)
