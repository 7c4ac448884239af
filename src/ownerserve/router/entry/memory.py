"""What memory workers have for the state of sessions: all of it, and that of those who do nothing.

Pure functions of what workers say of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from ownerserve.router.fleet import Candidates, room_tokens
from ownerserve.router.worker import FIRST_PROMPT_TOKENS, Worker, WorkerRole

QUICK = 4.0
"""A tier below counts as memory where a first prompt is brought back from it so many times as
quickly as it is computed."""
TIER_SHARE = 0.75
"""So much of it counts: the rest has points, and what sessions that are over left."""


def capacity_tokens(workers: Candidates, *, share: float, sessions: int) -> float | None:
    """Return how many tokens of so many sessions that `share` of the workers' memory holds
    (`memory_bytes`), less the fixed bytes of each; None where a worker's memory is not known, or
    tokens take none of it, and where the workers serve several models: sessions of one fill no
    memory of another's."""
    if len({worker.profile.model for worker in workers}) > 1:
        return None
    total = fixed = 0.0
    for worker in workers:
        profile, speed = worker.profile, worker.speed
        if not (profile.kv_bytes_total and profile.are_tokens_sized):
            return None
        if not speed.kv_bytes_per_token:
            return None
        total += memory_bytes(worker) / speed.kv_bytes_per_token
        fixed += speed.kv_bytes_per_sequence / speed.kv_bytes_per_token
    return total * share - fixed / max(len(workers), 1) * sessions


def memory_bytes(worker: Worker) -> float:
    """Return the bytes in which a worker keeps contexts at hand: of the device, or of a larger tier
    below, which has copies of what is on the device too, if it brings state back quickly."""
    profile, speed = worker.profile, worker.speed
    prompt_bytes = speed.sequence_bytes(FIRST_PROMPT_TOKENS)
    most = float(profile.kv_bytes_total)
    for tier, tier_bytes in profile.tier_bytes.items():
        if speed.media[tier].ms(prompt_bytes) * QUICK <= speed.first_prompt_ms:
            most = max(most, TIER_SHARE * tier_bytes)
    return most


def idle_workers(workers: Iterable[Worker]) -> list[Worker]:
    """Return those that could begin a new session at once."""
    return [
        worker
        for worker in workers
        if not worker.batch
        and not worker.pending_tokens
        and worker.profile.role is not WorkerRole.PREFILL
    ]


def take_idle(
    idle: list[Worker], prompt: int, beside_tokens: float, *, serving: Candidates
) -> bool:
    """Take a worker of those `serving` the prompt's model, and with room for it, out of `idle`, and
    return whether there was one: where no session lives or, up to `beside_tokens`, beside the
    contexts inside."""
    for worker in idle:
        if worker not in serving:
            continue
        if room_tokens(worker) >= prompt and (not worker.bound_sessions or prompt <= beside_tokens):
            idle.remove(worker)
            return True
    return False
