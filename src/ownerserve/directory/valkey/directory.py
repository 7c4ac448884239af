"""The directory on Valkey makes the same decisions, on records that are read and compared-and-set.

    read (1 trip) -> decide here -> commit if unchanged (1 trip, with WAIT) -> else once more

Owns one connection and no records. Many processes may do this on one Valkey: a decision stands
only when all it rests on is unchanged. An answer to a request that may change something is given
when `min_replicas` have it; else it is `not_replicated` and must be asked again.

While inventories come of which nothing is known (a directory that is being rebuilt), the next one
is taken to be unknown too and its extents are not read: the commit finds out if one is not.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from redis.exceptions import RedisError

from ownerserve.directory.decisions.decide import decide, seen_of
from ownerserve.directory.decisions.records import Key, Records
from ownerserve.directory.decisions.sweep import sweep
from ownerserve.directory.decisions.transaction import Moment, Transaction
from ownerserve.directory.messages import DirectoryRefusal, Ended, Outcome, Refused, Request
from ownerserve.directory.port import LEASE_S, SWEEP_IDLE_S, DirectoryStatus
from ownerserve.directory.valkey.primary import explained, find_primary
from ownerserve.directory.valkey.records import (
    NAMESPACE,
    PROVISIONAL,
    CommitBatch,
    FetchedRecords,
    RecordNotFetched,
    is_read_only,
    keys_of,
    new_to,
    with_counter,
)
from ownerserve.directory.valkey.scripts import BEGIN, COMMIT
from ownerserve.directory.valkey.source import ValkeySource
from ownerserve.kv.errors import InvalidInput, PeerLost
from ownerserve.kv.messages import NONCE_LIMIT, Epoch, Term, later

log = logging.getLogger("ownerserve.directory")

ROUNDS = 16
ROUND_RECORDS = 8_192
"""Records that are read and written in one trip, about: the server does nothing else meanwhile."""

META = NAMESPACE + b"term"


class ValkeyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Valkey options say how the backend is used. `min_replicas`: copies that must have a change
    before it is told; `timeout_s`: the longest that a trip may take, `wait_s` of it for replicas.
    """

    lease_s: float = LEASE_S
    min_replicas: int = 0
    timeout_s: float = 2.0
    wait_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.wait_s < self.timeout_s:
            raise InvalidInput("wait_s", f"{self.wait_s}", f"stay below timeout_s {self.timeout_s}")


class _Job:
    """A job is one thing to decide; `outcome` is set when it is done. The decision reads the
    records under `keys`, and those under `new`: extents of an inventory, which may not be known
    yet.
    """

    __slots__ = ("decide", "keys", "must_write", "new", "outcome")

    def __init__(
        self,
        keys: Iterable[Key],
        decide: Callable[[Records, Moment], Transaction],
        *,
        must_write: bool,
        new: frozenset[Key] = frozenset(),
    ) -> None:
        self.keys = set(keys)
        self.new = new
        self.decide = decide
        self.must_write = must_write
        self.outcome: Outcome | None = None


class ValkeyDirectory:
    """A Valkey directory is one whose memory is a Valkey server. It connects when first used, and
    again after every failure. Not for several threads.
    """

    def __init__(self, source: ValkeySource, options: ValkeyOptions | None = None) -> None:
        self.source = source
        self._options = options or ValkeyOptions()
        self._client: Any = None
        self._scripts: tuple[str, str] = ("", "")
        self._cursor = 0
        self._is_lost = False
        self._expects_new = False

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        """Decide on all requests, in as few trips as they allow: those on the same records go one
        after another."""
        seen: Epoch | None = None
        jobs = []
        for request in requests:
            seen = later(seen, seen_of(request))
            jobs.append(
                _Job(
                    keys_of(request),
                    partial(_decide, request),
                    must_write=not is_read_only(request),
                    new=new_to(request),
                )
            )
        self._run(jobs, seen)
        return [_outcome(job) for job in jobs]

    def status(self) -> DirectoryStatus:
        options = self._options
        try:
            self._connect()
            reply = self._began(self._client, None)
            keys = int(self._client.dbsize())
        except (RedisError, PeerLost) as error:
            self._lost(error)
            return DirectoryStatus("valkey", None, 0, 0.0, options.lease_s, None)
        now_us, ordinal, nonce, counter, open_us = reply[:5]
        opens_in_s = max(0, open_us - now_us) / 1e6
        term = Term(ordinal, nonce)
        return DirectoryStatus("valkey", term, counter, opens_in_s, options.lease_s, None, keys)

    def sweep(self, limit: int) -> int:
        """Look at about `limit` keys, in rounds with SCAN; says how many sessions ended."""
        try:
            self._connect()
            self._cursor, found = self._client.scan(
                self._cursor, match=NAMESPACE + b"?:*", count=limit
            )
        except (RedisError, PeerLost) as error:
            self._lost(error)
            return 0
        jobs = []
        for name in found:
            key = Key(name[len(NAMESPACE) :])
            jobs.append(
                _Job(
                    (key,),
                    partial(_sweep, key),
                    must_write=False,
                )
            )
        self._run(jobs, None)
        return sum(isinstance(_outcome(job), Ended) for job in jobs)

    def forget(self) -> DirectoryStatus:
        """Delete all records under a new term. Raises PeerLost when the primary can't be
        reached."""
        try:
            self._connect()
            self._began(self._client, None, how="forget")
            cursor = None
            while cursor != 0:
                cursor, names = self._client.scan(
                    cursor or 0, match=NAMESPACE + b"?:*", count=ROUND_RECORDS
                )
                if names:
                    self._client.unlink(*names)
        except RedisError as error:
            self._lost(error)
            raise explained(error, "the primary") from error
        return self.status()

    def reach(self) -> None:
        """Connect, and do what every request does first. Raises PeerLost when nobody answers, and
        BackendRefused, which is one, when an operator must act."""
        try:
            self._connect()
            self._began(self._client, None)
        except (RedisError, PeerLost) as error:
            self._disconnect()
            raise self._told(error) from error

    def close(self) -> None:
        self._disconnect()

    # ---- rounds

    def _run(self, jobs: list[_Job], seen: Epoch | None) -> None:
        """Go on in rounds until every job has its outcome, or the server is lost."""
        waiting, rounds = jobs, 0
        try:
            self._connect()
            while waiting and rounds < ROUNDS:
                fits = _fits(waiting)
                again = self._round(waiting[:fits], seen)
                # Waiting for one's own batch is no contention.
                rounds = rounds + 1 if len(again) == fits else 0
                waiting = again + waiting[fits:]
        except (RedisError, PeerLost) as error:
            self._lost(error)
            for job in jobs:
                job.outcome = job.outcome or Refused(DirectoryRefusal.UNREACHABLE)
        for job in waiting:
            job.outcome = job.outcome or Refused(DirectoryRefusal.CONTENDED)

    def _round(self, jobs: list[_Job], seen: Epoch | None) -> list[_Job]:
        """Read once, decide, commit once; returns the jobs that must go again."""
        fetched, wanted = FetchedRecords(), set().union(*(job.keys for job in jobs))
        expects_new = self._expects_new and all(job.new for job in jobs)
        for job in jobs:
            if expects_new:
                fetched.expect_new(job.new)
            else:
                wanted |= job.new
        at = self._fetch(fetched, wanted, seen)
        decided: list[tuple[_Job, Transaction]] = []
        again: list[_Job] = []
        undecided = jobs
        while undecided:
            missing: set[Key] = set()
            unread: list[_Job] = []
            for job in undecided:
                try:
                    decided.append((job, job.decide(fetched, at)))
                except RecordNotFetched as need:
                    job.keys.add(need.key)
                    missing.add(need.key)
                    unread.append(job)
            if missing:
                later_at = self._fetch(fetched, missing, seen)
                if later_at.epoch.term != at.epoch.term:
                    return jobs
            undecided = unread
        batch, writers = CommitBatch(), []
        for job, decision in decided:
            if batch.touches(job.keys) or batch.touches(job.new):
                again.append(job)
            elif not decision.writes and not job.must_write:
                job.outcome = decision.outcome
            else:
                batch.add(decision, fetched, at.epoch)
                writers.append((job, decision))
        if writers:
            again += self._commit_batch(batch, writers, at)
            self._expects_new = not again and all(
                job.new and (expects_new or fetched.knows_none(job.new)) for job, _ in writers
            )
        return again

    def _commit_batch(
        self, batch: CommitBatch, writers: list[tuple[_Job, Transaction]], at: Moment
    ) -> list[_Job]:
        term = at.epoch.term
        pipe = self._client.pipeline(transaction=False)
        arguments = (term.ordinal, term.nonce, batch.encoded())
        pipe.execute_command("EVALSHA", self._scripts[1], 1, META, *arguments)
        if self._options.min_replicas:
            pipe.wait(self._options.min_replicas, int(self._options.wait_s * 1000))
        counters, *waited = pipe.execute()
        self._is_lost = False
        if not counters:
            return [job for job, _ in writers]
        replicated = not waited or waited[0] >= self._options.min_replicas
        again = []
        for (job, decision), counter in zip(writers, counters, strict=True):
            if counter < 0:
                again.append(job)
            elif not replicated:
                job.outcome = Refused(DirectoryRefusal.NOT_REPLICATED)
            elif decision.minted:
                job.outcome = with_counter(decision.outcome, Epoch(term, counter))
            else:
                job.outcome = decision.outcome
        return again

    def _fetch(self, fetched: FetchedRecords, wanted: set[Key], seen: Epoch | None) -> Moment:
        keys = list(wanted)
        pipe = self._client.pipeline(transaction=False)
        self._began(pipe, seen)
        if keys:
            pipe.mget([NAMESPACE + key for key in keys])
        (now_us, ordinal, nonce, _counter, open_us), *values = pipe.execute()
        fetched.add(keys, values[0] if values else ())
        return Moment(
            now_us / 1e6,
            self._options.lease_s,
            open_us / 1e6,
            Epoch(Term(ordinal, nonce), PROVISIONAL),
        )

    def _began(self, to: Any, seen: Epoch | None, *, how: str = "") -> Any:
        floor = (seen.term.ordinal, seen.term.nonce, seen.counter) if seen else (0, 0, 0)
        arguments = (*floor, _nonce(), self._grace_us(), how)
        return to.execute_command("EVALSHA", self._scripts[0], 1, META, *arguments)

    # ---- the connection

    def _connect(self) -> None:
        if self._client is None:
            client = find_primary(self.source, META, timeout_s=self._options.timeout_s)
            self._client = client
            self._scripts = (client.script_load(BEGIN), client.script_load(COMMIT))

    def _lost(self, error: RedisError | PeerLost) -> None:
        level = logging.DEBUG if self._is_lost else logging.WARNING  # once an outage
        log.log(level, "directory backend lost: %s", self._told(error))
        self._is_lost = True
        self._disconnect()

    def _told(self, error: RedisError | PeerLost) -> PeerLost:
        return error if isinstance(error, PeerLost) else explained(error, "the primary")

    def _disconnect(self) -> None:
        """Close the connection: one that failed once is not used again, for its late answers would
        be another's.
        """
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _grace_us(self) -> int:
        return int(self._options.lease_s * 1e6)


def _fits(jobs: list[_Job]) -> int:
    """Count the jobs, from the first on, that go into one round: one at least."""
    records = 0
    for number, job in enumerate(jobs):
        records += len(job.keys) + len(job.new)
        if records > ROUND_RECORDS and number:
            return number
    return len(jobs)


def _outcome(job: _Job) -> Outcome:
    assert job.outcome is not None
    return job.outcome


def _decide(request: Request, records: Records, at: Moment) -> Transaction:
    return decide(records, request, at)


def _sweep(key: Key, records: Records, at: Moment) -> Transaction:
    return sweep(records, key, at, idle_s=SWEEP_IDLE_S)


def _nonce() -> int:
    return secrets.randbelow(NONCE_LIMIT)
