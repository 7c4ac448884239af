"""This module holds the gateway's settings: each once, with its unit and default."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from ownerserve.gateway.discovery.places import DnsServer, Place
from ownerserve.gateway.http.access import CREDENTIALS, Address
from ownerserve.gateway.http.callers import KeyedCallers
from ownerserve.gateway.http.client import ClientLimits
from ownerserve.gateway.http.heads import ANYBODY
from ownerserve.gateway.http.server_tls import TlsFiles
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.rollout.choice import RolloutChoice
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import ADMIN, GATEWAY, LOOPBACK, OWN_MODE, Protection, check_reach
from ownerserve.kv.units import KIB, MIB
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.router.admission import SeatSettings
from ownerserve.router.entry.queue import QueueSettings
from ownerserve.router.rollout.steering import Mode
from ownerserve.router.settings import DEFAULTS, Settings
from ownerserve.router.worker import DEFAULT_SPEED, Speed

FOUND_EXPECTED = 64
"""Workers that places may name: nobody knows before."""


class StreamUsage(StrEnum):
    """A stream's usage, where its client does not ask for it."""

    ASK = "ask"
    """The gateway asks for it, and keeps the event back."""
    LEAVE = "leave"
    """Nobody asks."""


class PrefillLegs(StrEnum):
    """The legs of a turn whose prompt one of our workers computes for another one."""

    ONE = "one"
    """The turn goes to who answers, who asks the other one."""
    BOTH = "both"
    """The turn goes to both at once."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A config has all settings of one gateway; a name's ending is its unit."""

    workers: tuple[Address, ...]
    places: tuple[Place, ...] = ()
    """Where further workers are found, and where it is seen that they are gone."""
    discovery_latest_s: float = 30.0
    """So long a name's addresses count at most, whatever its records say."""
    dns_server: DnsServer | None = None
    """The server that is asked for names; None: the system's."""
    kubeconfig: Path | None = None
    """How the API server of Kubernetes is reached; None: as a pod, else as its user does."""
    policy: str = "ownerserve"
    mode: Mode = Mode.NORMAL
    shadow: str | None = None
    """The policy that decides beside `policy` in normal mode, and does nothing; None: nobody."""
    canary_policy: str | None = None
    """The policy that decides for the canary's sessions; None: `policy`."""
    canary_share: float = 0.0
    """The share of sessions that are the canary's, of tenants without one of their own."""
    host: str = LOOPBACK
    port: int = 0
    """0 takes a free one."""
    unix: Path | None = None
    """The file of a Unix socket, which the data port is then, in place of `host` and `port`."""
    unix_mode: int = OWN_MODE
    tls: TlsFiles | None = None
    """The data port's certificate; None: it speaks in the clear."""
    admin_tls: TlsFiles | None = None
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
    hedge_after_s: float | None = None
    """After so long without anything of a streamed answer a second worker is asked too; None:
    never."""
    stream_usage: StreamUsage = StreamUsage.ASK
    """Whether the usage of streams is asked for whose clients don't."""
    prefill_legs: PrefillLegs = PrefillLegs.ONE
    """How many legs a turn has whose prompt one of our workers computes for another one."""
    carry_on: bool = False
    """Whether a stream whose worker dies in its middle is carried on by another, where its request
    is greedy or has a seed."""
    wait_comments_s: float = 10.0
    """After so long a streamed turn that waits before the fleet is told so, in a comment of its
    stream, and as often again: proxies give up on a silent server. 0: never."""
    idle_timeout_s: float = 75.0
    """A kept connection without a request is closed after this."""
    opening_s: float = 0.0
    """So long after its start it sends sessions that nobody knows where others that begin with it
    would (router/opening.py); 0: it goes by its own tables from the first on."""
    drain_notice_s: float = 0.0
    """So long before it takes no more /health says that it will: who balances load turns away."""
    drain_timeout_s: float = 30.0
    access_log: bool = False
    """Whether the log has a line for each turn."""
    otlp_endpoint: str | None = None
    """The collector that gets spans of turns, by OTLP/HTTP; None: nothing is recorded."""
    otlp_share: float = 1.0
    """This share of the turns that come without a trace is recorded; any other goes by its flag."""
    health_interval_s: float = 1.0
    health_timeout_s: float = 3.0
    health_slow_s: float = 0.75
    """A worker whose probe is unanswered for so long is told of as slow: with the interval before
    the probe that is within 2 s."""
    news_ms: float | None = 50.0
    """What came to or went from a worker's tiers is heard so long after it was said, at most; None:
    never."""
    decisions_kept: int = 1000
    settings: Settings = DEFAULTS
    queue: QueueSettings = QueueSettings()
    """How many turns may run at once, and how many wait for how long."""
    seats: SeatSettings | None = SeatSettings()
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
    def workers_expected(self) -> int:
        """For how many workers descriptors are set aside."""
        return len(self.workers) + (FOUND_EXPECTED if self.places else 0)

    def check(self) -> None:
        """Raise InvalidInput, which names the option at fault, for settings that no gateway starts
        with."""
        self.rollout.check()
        if not self.workers and not self.places:
            mend = "give --worker URL at least once, or where workers are found (--worker-dns)"
            raise InvalidInput("worker", "none given", mend)
        if len({address.worker for address in self.workers}) < len(self.workers):
            raise InvalidInput("worker", "one address is given twice", "give each once")
        check_reach(GATEWAY, self.host, self.protection)
        check_reach(ADMIN, self.admin_host, self.admin_protection)

    @property
    def rollout(self) -> RolloutChoice:
        """The choice of who decides."""
        return RolloutChoice(
            mode=self.mode,
            policy=self.policy,
            shadow=self.shadow,
            canary_policy=self.canary_policy,
            canary_share=self.canary_share,
            settings=self.settings,
        )

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
        if self.tenants is not None or _asks_for_certificates(self.tls):
            return Protection.KEYED
        return Protection.VOUCHED if self.allow_remote else Protection.OPEN

    @property
    def admin_protection(self) -> Protection:
        """What the admin port asks."""
        is_open = self.admin_key is None and not _asks_for_certificates(self.admin_tls)
        return Protection.OPEN if is_open else Protection.KEYED

    def __repr__(self) -> str:
        """Show all settings but the keys, which belong in no log."""
        names = (name for name in self.__struct_fields__ if name not in ("admin_key", "worker_key"))
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def _asks_for_certificates(tls: TlsFiles | None) -> bool:
    """Return whether nobody is answered without a certificate of certain authorities."""
    return tls is not None and tls.client_authorities is not None
