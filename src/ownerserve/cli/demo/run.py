"""This module makes one policy's run of the demo: fresh workers, the workload through the gateway,
the sums."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from ownerserve.cli.demo.drive import SessionResult, TurnAnswer, run_conversations
from ownerserve.cli.demo.fleets import DemoRun
from ownerserve.cli.demo.forked import forked
from ownerserve.cli.demo.machine import cpu_ticks, others_share
from ownerserve.cli.demo.processes import DemoFleet
from ownerserve.cli.demo.spoken import metrics, spoken
from ownerserve.cli.demo.workload import Conversation, Transcript, unserved_s
from ownerserve.report.demo_results import PolicyResult, PoolUse, PressureTotals, spread

T = TypeVar("T")


class DeviceStatus(msgspec.Struct):
    """This is a worker's status as far as the table needs it."""

    device: PoolUse


class DemoSetup(msgspec.Struct, frozen=True):
    """The setup is what every policy gets alike."""

    model: str
    workers: int
    kv_memory: str
    host_cache: str
    conversations: Sequence[Conversation]

    @property
    def worker_arguments(self) -> list[str]:
        """`worker_arguments` are the arguments of each worker's command."""
        return [
            *("worker", "--model", self.model, "--port", "0"),
            *("--kv-memory", self.kv_memory, "--max-running", "8"),
            *("--host-cache", self.host_cache),
        ]


def run_policy(
    run: DemoRun, setup: DemoSetup, transcript: Transcript, *, on_turn: Callable[[TurnAnswer], None]
) -> tuple[PolicyResult, list[TurnAnswer]]:
    """Start a fleet, drive the workload, stop the fleet. Raises PeerLost when a process dies."""
    with (
        tempfile.TemporaryDirectory(prefix="ownerserve-demo-") as folder,
        DemoFleet(Path(folder), begin=forked) as fleet,
    ):
        fleet.start(setup.worker_arguments, run)
        measured = (os.getpid(), *fleet.pids)
        before, started_s = cpu_ticks(measured), time.perf_counter()
        sessions = asyncio.run(
            run_conversations(
                fleet.gateway_url,
                setup.conversations,
                model=setup.model,
                transcript=transcript,
                on_turn=on_turn,
            )
        )
        took_s, after = time.perf_counter() - started_s, cpu_ticks(measured)
        answers = [answer for session in sessions for answer in session.answers]
        factor = wall_clock_factor(took_s, setup.conversations)
        result = _result(sessions, answers, fleet.worker_urls, factor=factor)
        said = spoken(fleet)
        result = msgspec.structs.replace(
            result,
            reasons=dispatches(fleet.admin_url),
            directory_messages=said.directory,
            directory_frames=said.frames,
            node_requests=said.node,
            moves=moved_turns(setup.conversations, sessions),
            peer_bytes=sum(peer_bytes(url) for url in fleet.worker_urls),
            others_cpu_share=others_share(before, after),
        )
        return result, answers


class _Counted(msgspec.Struct):
    counters: PressureTotals
    cached_tokens: dict[str, int]


class _Blocks(msgspec.Struct):
    block_tokens: int


class _Device(msgspec.Struct):
    device: _Blocks


SPILLED = re.compile(r'^ownerserve_spilled_slots_total\{component="(\w+)"\} (\S+)$', re.MULTILINE)


PROMPT_TOKENS = re.compile(r"^ownerserve_prompt_tokens_total (\S+)$", re.MULTILINE)
CACHED_TOKENS = re.compile(r"^ownerserve_cached_tokens_total\{.*\} (\S+)$", re.MULTILINE)

PEER_BYTES = re.compile(r"^ownerserve_peer_read_bytes_total (\S+)$", re.MULTILINE)

DISPATCHES = re.compile(
    r'^ownerserve_gateway_dispatches_total\{reason="(\w+)"\} (\S+)$', re.MULTILINE
)


def dispatches(admin_url: str) -> dict[str, int]:
    """Return why the gateway sent turns where it did: its own count of dispatches."""
    found = DISPATCHES.findall(metrics(admin_url))
    return {name: int(float(count)) for name, count in found}


def peer_bytes(url: str) -> int:
    """Return the bytes that one worker read of others, by its own count."""
    return sum(int(float(count)) for count in PEER_BYTES.findall(metrics(url)))


def _pressure(url: str) -> PressureTotals:
    """Return what one worker counted. Its range components are evicted in lock-step."""
    counted = _ask(url, "cache", _Counted)
    pressure = counted.counters
    blocks = pressure.evicted_tokens // _ask(url, "status", _Device).device.block_tokens
    pressure.evicted_blocks = dict.fromkeys(counted.cached_tokens, blocks)
    pressure.spilled_slots = {name: int(float(n)) for name, n in SPILLED.findall(metrics(url))}
    return pressure


def _ask(url: str, path: str, kind: type[T]) -> T:
    response = httpx.get(f"{url}/ownerserve/{path}", timeout=30, trust_env=False)
    response.raise_for_status()
    return msgspec.json.decode(response.content, type=kind)


def _result(
    sessions: Sequence[SessionResult],
    answers: Sequence[TurnAnswer],
    worker_urls: Sequence[str],
    *,
    factor: float,
) -> PolicyResult:
    good = [answer for answer in answers if not answer.error]
    prompt = sum(answer.prompt_tokens for answer in good)
    computed = [computed_tokens(metrics(url)) for url in worker_urls]
    saved = prompt - sum(computed)
    kept: Counter[str] = Counter()
    pressure = PressureTotals()
    for url in worker_urls:
        kept.update(_ask(url, "status", DeviceStatus).device.kept_bytes())
        pressure.add(_pressure(url))
    return PolicyResult(
        sources=sources_of(good),
        requests=len(answers),
        errors=len(answers) - len(good),
        prompt_tokens=prompt,
        computed_tokens=sum(computed),
        cached_token_share=saved / prompt if prompt else 0.0,
        prefill_tokens_saved=saved,
        ttft_ms=spread([answer.ttft_ms for answer in good]),
        tpot_ms=spread([answer.tpot_ms for answer in good if answer.tpot_ms]),
        hotspot_index=hotspot_index(computed, len(worker_urls)),
        wall_clock_factor=factor,
        e2e_s=spread([session.e2e_s for session in sessions]),
        modes=dict(Counter(answer.mode or "unknown" for answer in good)),
        requests_by_worker=dict(sorted(Counter(answer.worker for answer in good).items())),
        kv_bytes=dict(kept),
        pressure=pressure,
        first_errors=[answer.error for answer in answers if answer.error][:3],
    )


def sources_of(answers: Sequence[TurnAnswer]) -> dict[str, int]:
    """Return the prompt tokens that were at hand where they were answered, by where they were: what
    was not loaded for the turn was on the device."""
    sources: Counter[str] = Counter()
    for answer in answers:
        sources.update(answer.brought)
        sources["device"] += max(0, answer.cached_tokens - sum(answer.brought.values()))
    return dict(sources)


def moved_turns(conversations: Sequence[Conversation], sessions: Sequence[SessionResult]) -> int:
    """Return how many turns ran at another worker than their session's turn before; an agent of a
    conversation is a session of its own."""
    moved = 0
    for conversation, session in zip(conversations, sessions, strict=True):
        last: dict[str, str] = {}
        for turn, answer in zip(conversation.turns, session.answers, strict=True):
            if answer.worker:
                moved += last.get(turn.agent, answer.worker) != answer.worker
                last[turn.agent] = answer.worker
    return moved


def wall_clock_factor(took_s: float, conversations: Sequence[Conversation]) -> float:
    """Return how long a run took over how long it takes when answers cost no time."""
    return took_s / max(max(map(unserved_s, conversations), default=0.0), 1e-3)


def computed_tokens(told: str) -> int:
    """Return the prompt tokens that a worker computed, by its own counts as it tells Prometheus:
    all that came to it, but for those that it had of the component of which it had least.

    An answer's usage does not tell: what another worker computed for a turn is cached there.
    """
    admitted = PROMPT_TOKENS.search(told)
    cached = [float(count) for count in CACHED_TOKENS.findall(told)]
    return round((float(admitted[1]) if admitted else 0.0) - min(cached, default=0.0))


def hotspot_index(computed: Collection[int], workers: int) -> float:
    """Return the prompt tokens that the busiest worker computed, over the mean of all workers, of
    whom those that are left out computed none."""
    total = sum(computed)
    return max(computed) * workers / total if total else 1.0
