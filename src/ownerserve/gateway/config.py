"""This module holds the gateway's settings: each once, with its unit and default."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ownerserve.gateway.http.access import CREDENTIALS, Address
from ownerserve.gateway.http.callers import KeyedCallers
from ownerserve.gateway.http.client import ClientLimits
from ownerserve.gateway.http.heads import ANYBODY
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.kv.listening import LOOPBACK, Protection
from ownerserve.kv.units import KIB, MIB
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.router.admission import SeatSettings
from ownerserve.router.settings import DEFAULTS, Settings
from ownerserve.router.worker import DEFAULT_SPEED, Speed


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A config has all settings of one gateway; a name's ending is its unit."""

    workers: tuple[Address, ...]
    policy: str = "ownerserve"
    host: str = LOOPBACK
    port: int = 0
    """0 takes a free one."""
    tenants: KeyedCallers | None = None
    """Callers who are let in, and whose state is kept apart; None: anybody is, and all share."""
    allow_remote: bool = False
    """Something else asks clients for keys, before this gateway: the operator vouches for it."""
    receipts: ReceiptForm = ReceiptForm.OPAQUE
    """How much of the fleet clients are told."""
    admin_host: str = LOOPBACK
    admin_port: int = 0
    admin_key: str | None = None
    """What the admin port asks for; None: nothing, and it stays on loopback."""
    head_max_bytes: int = 64 * KIB
    body_max_bytes: int = 32 * MIB
    """A request body is held once, whole: it is scanned, and kept until the first byte returns."""
    bodies_max_bytes: int = 512 * MIB
    """So much all requests' bodies may hold together; what comes then is told 503, unread."""
    connect_timeout_s: float = 3.0
    head_timeout_s: float = 30.0
    body_timeout_s: float = 300.0
    first_byte_timeout_s: float = 600.0
    """A worker that is up may send nothing of a streamed answer for so long: first before it has
    computed the prompt, behind others' prompts, and then in its middle. At 500 tokens a second,
    which is slow, 100k tokens take 200 s."""
    whole_answer_timeout_s: float = 3600.0
    """The same for an answer that is sent whole, of which nothing comes before its last token."""
    idle_timeout_s: float = 75.0
    """A kept connection without a request is closed after this."""
    opening_s: float = 0.0
    """So long after its start it sends sessions that nobody knows where others that begin with it
    would (router/opening.py); 0: it goes by its own tables from the first on."""
    drain_timeout_s: float = 30.0
    access_log: bool = False
    """Whether the log has a line for each turn."""
    health_interval_s: float = 1.0
    health_timeout_s: float = 3.0
    decisions_kept: int = 1000
    settings: Settings = DEFAULTS
    seats: SeatSettings | None = None
    """How many sessions may run at once; None: all that come."""
    speed: Speed = DEFAULT_SPEED
    """The speed by which workers are priced that do not state theirs."""
    worker_key: str | None = None
    """Presented to the workers, in place of a client's own; None: the client's own goes through."""
    worker_ca_file: Path | None = None
    """Certificates that are believed of https workers beside the system's."""
    fleet_key: FleetKey | None = None
    """The keys that workers' RPC ports want off loopback; None: those are not asked."""

    @property
    def limits(self) -> ClientLimits:
        """What clients may send, and how long they may take."""
        return ClientLimits(
            head_max_bytes=self.head_max_bytes,
            body_max_bytes=self.body_max_bytes,
            head_timeout_s=self.head_timeout_s,
            body_timeout_s=self.body_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            replaced=CREDENTIALS if self.worker_key or self.tenants else frozenset(),
            callers=ANYBODY if self.tenants is None else self.tenants,
        )

    @property
    def protection(self) -> Protection:
        """What is asked of clients."""
        if self.tenants is not None:
            return Protection.KEYED
        return Protection.VOUCHED if self.allow_remote else Protection.OPEN

    @property
    def admin_protection(self) -> Protection:
        """What the admin port asks."""
        return Protection.OPEN if self.admin_key is None else Protection.KEYED

    def __repr__(self) -> str:
        """Show all settings but the keys, which belong in no log."""
        names = (name for name in self.__struct_fields__ if name not in ("admin_key", "worker_key"))
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
