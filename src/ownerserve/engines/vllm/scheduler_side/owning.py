"""This module keeps the sessions that have turns here: what the scheduler tells of them, and what
is asked.

Owns which sessions have a turn here now; `Ownership` owns the grants, on a thread of its own. The
scheduler's thread tells, the RPC's asks. Without a directory nothing is owned: gateways keep the
sessions in their own tables. The ports and keys of an engine core are made here too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from ownerserve.directory.opening import opener_of
from ownerserve.directory.port import Directory
from ownerserve.engines.vllm.turns.turn import is_final, session_of
from ownerserve.kv.addresses import KEYED
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.listening import RPC, TRANSFER, Protection, check_reach
from ownerserve.kv.messages import ExecutionMode
from ownerserve.kv.prefix import Packed
from ownerserve.kv.wire.curve import FleetKey, read_fleet_key
from ownerserve.kv.wire.headers import is_name
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import AskLine, Reject, Released, ReleaseSession
from ownerserve.node.ownership.ownership import (
    OwnerIs,
    Ownership,
    SessionLeft,
    Told,
    TurnCame,
    TurnLeft,
)
from ownerserve.node.rpc.server import RpcServer
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.node.transfers.roads import SHM, TCP
from ownerserve.transfer.movers.tcp.settings import check_interface

FIELD = "kv_connector_extra_config.directory"
HEARD_KEPT = 4096
CLOSE_S = 2.0
"""How long a stopping engine waits for the directory to take its sessions back."""


KEY_FIELD = "kv_connector_extra_config.curve_key_file"
HOST_FIELD = "kv_connector_extra_config.rpc_host"
TRANSFER_FIELD = "kv_connector_extra_config.transfer_host"
INTERFACE_FIELD = "kv_connector_extra_config.transfer_interface"


def fleet_key(key_file: str) -> FleetKey | None:
    """Read the keys in `key_file`; None where that is empty. Raises InvalidInput."""
    return read_fleet_key(Path(key_file), field=KEY_FIELD) if key_file else None


def gateway_port(host: str, port: int, key_file: str) -> RpcServer | None:
    """Make the port at which gateways of other hosts ask; None without a `host`.

    Raises InvalidInput where nothing can listen there, or nobody may without keys.
    """
    if not host:
        return None
    key = fleet_key(key_file)
    at = msgspec.structs.replace(RPC, host_option=HOST_FIELD, opened_by="curve_key_file")
    check_reach(at, host, Protection.OPEN if key is None else Protection.KEYED)
    return RpcServer(host=host, port=port, key=key)


def transfer_place(
    host: str, port: int, key_file: str, *, lend_bytes: int, interface: str
) -> TransferPlace:
    """Return where peers read this engine. They are read by shared memory and TCP alone: that any
    process of its user may read its own memory is not for a connector to say.

    Raises InvalidInput where nobody may read it without keys, and for an interface that is not
    here.
    """
    key = fleet_key(key_file)
    at = msgspec.structs.replace(TRANSFER, host_option=TRANSFER_FIELD, opened_by="curve_key_file")
    check_reach(at, host, Protection.OPEN if key is None else Protection.KEYED)
    check_interface(interface, field=INTERFACE_FIELD)
    roads = (SHM.name, TCP.name)
    return TransferPlace(
        host, port, key=key, roads=roads, stage_bytes=lend_bytes, interface=interface
    )


def opener(url: str, key_file: str = "") -> Callable[[], Directory]:
    """Return a maker of clients of the directory at `url`, with the fleet's keys in `key_file`
    (empty: none). Raises InvalidInput for what names none, or one whose client is not installed
    beside vLLM."""
    key = fleet_key(key_file)
    if url.startswith(KEYED) and key is None:
        raise InvalidInput(FIELD, f"{url[:80]} wants the fleet's keys", "set curve_key_file too")
    try:
        return opener_of(url, key, field=FIELD)
    except ImportError as error:
        mend = "install ownerserve[valkey] beside vLLM"
        place = url.rpartition("@")[2][:80]
        raise InvalidInput(FIELD, f"{place!r} needs {error.name}", mend) from error


_NOTHING = AskLine()

BEGUN_KEPT = 4096
"""Sessions of which it is known what came of their prompts."""
BEGUN_TURNS = 8
"""Turns of one session whose answers are still to come, at most."""


class PromptCame(msgspec.Struct, frozen=True, gc=False):
    """A `PromptCame` says what came of the prompt of the request `request_id`, as its first step
    was planned. The device has its first `tokens` tokens, which end in `tip`, once they are
    computed; None: it keeps none. `brought` are those that were loaded for it, by where they came
    from."""

    request_id: str
    mode: ExecutionMode
    lost_tokens: int = 0
    tip: PrefixHash | None = None
    tokens: int = 0
    brought: Mapping[str, int] = {}


class SessionsHere:
    """`SessionsHere` are the sessions with turns at one engine. `ownership` None: there is no
    directory."""

    def __init__(self, ownership: Ownership | None) -> None:
        self._ownership = ownership
        self._turns: Counter[str] = Counter()
        self._heard: dict[str, AskLine] = {}
        """What gateways said of the turns that are here, until they end."""
        self._coming: OrderedDict[str, AskLine] = OrderedDict()
        """What gateways said of where more of a coming turn's prompt is; the last HEARD_KEPT."""
        self._begun: OrderedDict[str, tuple[PromptCame, ...]] = OrderedDict()
        """By session, until the answer is asked about: a whole one comes after its turn's end."""
        self._lock = Lock()

    @property
    def owns(self) -> bool:
        """`owns` tells whether sessions are owned here at all."""
        return self._ownership is not None

    @property
    def counts(self) -> dict[str, int]:
        """`counts` are frames, what the directory answered, and what was refused here, so far."""
        if self._ownership is None:
            return {}
        refused = list(self._ownership.owner.refused.items())
        return {
            "frames": self._ownership.frames,
            **{str(answer): n for answer, n in list(self._ownership.answers.items())},
            **{f"refused_{verb}_{reason}": n for (verb, reason), n in refused},
        }

    # -- told by the scheduler's thread --------------------------------------------------------

    def came(self, request: Any) -> None:
        """Note that a turn of a session is here, and tell the directory."""
        session = session_of(request)
        if session is None:
            return
        with self._lock:
            self._turns[session] += 1
        if is_name(session):
            self._tell(TurnCame(SessionId(session)))

    def brought_from(self, request: Any) -> AskLine | None:
        """Return, once, what a gateway said of where more of the turn's prompt is; None: of this
        one nothing."""
        session = session_of(request)
        with self._lock:
            return None if session is None else self._coming.pop(session, None)

    def begun(self, request: Any, came: PromptCame) -> None:
        """Note what came of a turn's prompt, for the line on its answer."""
        session = session_of(request)
        if session is None or not is_name(session):
            return
        with self._lock:
            before = self._begun.pop(session, ())
            self._begun[session] = (*before, came)[-BEGUN_TURNS:]
            if len(self._begun) > BEGUN_KEPT:
                self._begun.popitem(last=False)

    def ended(self, request: Any, tokens: Packed, tenant: bytes = b"") -> None:
        """Note that a turn is here no more. Unless it was given up it leaves `tokens` computed, or
        was the session's last."""
        session = session_of(request)
        if session is None:
            return
        with self._lock:
            self._turns -= Counter((session,))
            is_alone = session not in self._turns
            heard = self._heard.get(session, _NOTHING)
            if is_alone:
                self._heard.pop(session, None)
        if request.status.name == "FINISHED_ABORTED" or not is_name(session):
            return
        if not is_final(request):
            name, before = SessionId(session), heard.version
            self._tell(TurnLeft(name, tokens, heard.group, tenant=tenant, before=before))
        elif is_alone:  # else whoever said that it ends was wrong
            self._tell(SessionLeft(SessionId(session)))

    def close(self) -> None:
        """Give all sessions back, if the directory answers in time."""
        if self._ownership is not None:
            self._ownership.close(within_s=CLOSE_S)

    def _tell(self, told: Told) -> None:
        if self._ownership is not None:
            self._ownership.tell(told)

    # -- asked by the RPC's thread -------------------------------------------------------------

    def release(self, asked: ReleaseSession) -> Released | Reject:
        """Give the session up, which goes elsewhere; rejected while a turn of it is here."""
        with self._lock:
            if asked.session_id in self._turns:
                return Reject(WorkerRefusal.SESSION_IS_RUNNING)
            if self._ownership is None:
                return Released()
            return self._ownership.release(asked)

    def heard(self, asked: AskLine) -> OwnerIs | None:
        """Note what a gateway says of a turn that comes; return who owns its session, as far as is
        known."""
        session = asked.session_id
        if session is None or not is_name(session):
            return None
        if asked.bring_from is not None:
            with self._lock:
                self._coming[session] = asked
                if len(self._coming) > HEARD_KEPT:
                    self._coming.popitem(last=False)
        if self._ownership is None:
            return None
        if asked.group or asked.version:
            with self._lock:
                self._heard[session] = asked
                if len(self._heard) > HEARD_KEPT:
                    del self._heard[next(iter(self._heard))]
        if asked.parent is not None or asked.epoch is not None:
            self._tell(TurnCame(session, asked.parent, asked.epoch))
        return self._ownership.owner_of(session)

    def came_of(self, asked: AskLine) -> PromptCame | None:
        """Return what came of the prompt whose answer is asked about, once. None: nobody says which
        request that is, or nothing is known of it.

        vLLM's name of a request has the id in it that came with it in x-request-id; requests for
        the same answer (`n`) follow each other, and the first one met what the others meet too.
        """
        if asked.session_id is None or not asked.request_id:
            return None
        with self._lock:
            begun = self._begun.pop(asked.session_id, ())
            own = tuple(came for came in begun if asked.request_id in came.request_id)
            rest = tuple(came for came in begun if came not in own)
            if rest:
                self._begun[asked.session_id] = rest
        return own[0] if own else None
