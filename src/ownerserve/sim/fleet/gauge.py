"""This module reads a modelled worker from outside: its stamp, its memory, what it did. Changes
nothing."""

from __future__ import annotations

from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.status import RefillShare, WorkerLoad
from ownerserve.sim.metrics.counters import FleetCounters
from ownerserve.sim.metrics.samples import WorkerSample
from ownerserve.sim.worker.worker import SimWorker


def status(worker: SimWorker, now: float) -> WorkerLoad:
    """Return the worker's load as it is stamped on an answer."""
    machine, restoring = worker.machine, worker.restoring
    engine = machine.engine
    pending, waiting = engine.pending_tokens, engine.waiting
    if restoring:
        pending, waiting = pending_tokens(worker), waiting + len(restoring)
    levels = machine.cache.occupancy
    running = len(engine.decoding) + len(engine.prefilling)
    return WorkerLoad(
        worker.unit,
        now,
        pending,
        running,
        waiting,
        kv_bytes_free=levels.blocks.free * worker.block_bytes,
        kv_bytes_total=worker.kv_bytes_total,
        kv_bytes_evictable=levels.evictable_blocks() * worker.block_bytes,
        refill_shares=refill_shares(worker, now),
        busy_share=worker.busy.read(busy_s(worker), now),
    )


def refill_shares(worker: SimWorker, now: float) -> tuple[RefillShare, ...]:
    """Return what taking more costs the worker; its node counts in units."""
    unit = worker.unit_tokens
    said = worker.machine.node.refill.shares(now)
    return tuple([RefillShare(one.tokens * unit, one.share) for one in said])


def busy_s(worker: SimWorker) -> float:
    """Return how long the worker has computed in all its lives, in seconds."""
    busy_ms = 0.0
    for machine in worker.lives:
        busy_ms += machine.engine.counts.busy_ms
    return busy_ms / 1000.0


def pending_tokens(worker: SimWorker) -> int:
    """Return how many prompt tokens are at the worker and not computed."""
    tokens = worker.machine.engine.pending_tokens
    for sequence in worker.restoring.values():
        tokens += sequence.pending_tokens
    return tokens


def has_turn_of(worker: SimWorker, session: SessionId) -> bool:
    """Return whether a turn of the session is at the worker, if only in its queue."""
    everyone = (*worker.restoring.values(), *worker.machine.engine.everyone())
    return any(sequence.turn.name == session for sequence in everyone)


def sample(worker: SimWorker) -> WorkerSample:
    """Return the worker's load now, as a sample."""
    engine, blocks = worker.machine.engine, worker.machine.cache.occupancy.blocks
    pending = pending_tokens(worker) if worker.restoring else engine.pending_tokens
    used_bytes = (blocks.capacity - blocks.free) * worker.block_bytes
    running = len(engine.decoding) + len(engine.prefilling)
    return WorkerSample(pending, running, used_bytes, busy_s(worker))


def tally(worker: SimWorker, counters: FleetCounters) -> None:
    """Add what all of the worker's lives did to the fleet's counters."""
    for machine in worker.lives:
        counts, cache = machine.engine.counts, machine.cache.counters
        counters.steps += counts.steps
        counters.preemptions += counts.preemptions
        counters.decode_alone_ms += counts.decoding_ms - counts.interfered_ms
        counters.decode_stall_ms += counts.interfered_ms
        counters.evictions += cache.evictions
        counters.evicted_tokens += cache.evicted_tokens * worker.unit_tokens
        counters.evicted_blocks += cache.evicted_tokens // machine.cache.layout.block_tokens
        counters.wanted_tokens += cache.wanted_tokens * worker.unit_tokens
