"""What a placement costs: seed 000 §3.6.5, each term in ms, priced for one way at a time.

    C(a) = T_queue + T_compute + T_network + T_restore + lambda M_HBM + delta D + mu I_decode

| term | is |
|---|---|
| queue | until the prefilling worker begins: pending prefill tokens x its ms a token |
| compute | prefill of what is not cached, then decode of the expected answer in that batch |
| network | bytes that come from another worker's memory |
| restore | bytes that come from a store tier, and the tokens computed again after a restore |
| memory | lambda x GiB of device memory newly taken x how full that memory is |
| duplicate | delta x GiB that lie on two devices from then on, x how full the other one is |
| interference | mu x ms of prefill x sequences that decode there meanwhile |

A sequence's bytes are those of its tokens and what it keeps beside: point state, which is taken,
sent and held twice whole, however few tokens go with it.
Network and restore are priced without overlap with compute: an upper bound, the same for all ways.
Nothing is counted twice: what waits behind a queue is in `queue`, what runs is in the others.
"""

from __future__ import annotations

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.kv.units import GIB
from ownerserve.router.decision import Option
from ownerserve.router.extents import Copy
from ownerserve.router.request import Request
from ownerserve.router.settings import Settings
from ownerserve.router.turns import TurnClass
from ownerserve.router.worker import Worker


class Pricer:
    """Prices ways to place one request. Holds the weights, no state."""

    def __init__(self, settings: Settings) -> None:
        self._lambda = settings.memory_ms_per_gib / GIB
        self._delta = settings.duplicate_ms_per_gib / GIB
        self._mu = settings.interference

    def local(self, request: Request, worker: Worker) -> Option:
        """Compute there whatever its device does not hold."""
        cached = request.cached_on(worker)
        is_going_on = cached > 0 and request.turn is _CONTINUATION
        action = _DECODE if is_going_on else _COLOCATED
        return self._price(request, worker, action, cached, cached, None)

    def bring(
        self, request: Request, worker: Worker, *, action: PlacementAction, source: Copy
    ) -> Option:
        """Bring the state from `source` to `worker`, compute the rest there."""
        tokens, known_tokens = source.tokens, request.known_tokens
        cached = tokens if tokens < known_tokens else known_tokens
        return self._price(request, worker, action, cached, request.cached_on(worker), source)

    def apart(self, request: Request, worker: Worker, prefill: Worker) -> Option:
        """Prefill at `prefill`, send what `worker` lacks there, decode at `worker`."""
        speed = prefill.speed
        held, lent = request.cached_on(worker), request.cached_on(prefill)
        prompt = request.prompt_tokens
        prefill_ms = speed.prefill.ms(prompt - lent, lent)
        queue_ms = prefill.queue_ms
        there = worker.speed
        step_ms = there.step_ms + there.step_ms_per_sequence * (worker.batch + 1)
        compute_ms = prefill_ms + request.output_tokens * step_ms
        network_ms = speed.media[_PEER].ms(speed.sequence_bytes(prompt - held))
        taken_bytes = there.sequence_bytes(prompt - held + request.output_tokens)
        memory_ms = self._lambda * taken_bytes * worker.occupancy
        # The prefilling worker keeps what it computed until it needs the room.
        duplicate_ms = self._held_twice_ms(prompt - lent, prefill)
        interference_ms = self._mu * prefill_ms * prefill.batch
        return Option(
            _REMOTE, worker, lent, queue_ms, compute_ms, network_ms, 0.0, memory_ms, duplicate_ms,
            interference_ms, queue_ms + compute_ms + network_ms + memory_ms + duplicate_ms
            + interference_ms, prompt - held, None, prefill,
        )  # fmt: skip

    def _price(
        self,
        request: Request,
        worker: Worker,
        action: PlacementAction,
        cached: int,
        held: int,
        source: Copy | None,
    ) -> Option:
        """`held` of the `cached` tokens are there, the others come from `source`."""
        speed, load = worker.speed, worker.load
        batch, queue_ms, occupancy = worker.batch, load.queue_ms, load.occupancy
        answer_tokens = request.output_tokens
        prompt_tokens = request.prompt_tokens
        prefill_ms = speed.prefill.ms(prompt_tokens - cached, cached)
        compute_ms = prefill_ms + answer_tokens * (
            speed.step_ms + speed.step_ms_per_sequence * (batch + 1)
        )
        network_ms = restore_ms = memory_ms = duplicate_ms = 0.0
        if source is not None:
            moved_bytes = speed.sequence_bytes(cached - held)
            if speed.replay_tokens:
                restore_ms = speed.prefill.ms(min(speed.replay_tokens, cached), cached)
                prefill_ms += restore_ms
            holder = source.worker or worker
            if source.tier is not _DEVICE:
                restore_ms += holder.speed.media[source.tier].ms(moved_bytes)
            if holder is not worker:
                network_ms = speed.media[_PEER].ms(moved_bytes)
        if occupancy:
            taken_tokens = prompt_tokens - held + answer_tokens
            memory_ms = self._lambda * speed.sequence_bytes(taken_tokens) * occupancy
        if action is not _MIGRATION:
            known_tokens = request.known_tokens
            for copy in request.copies:
                if copy.worker is not worker:
                    tokens = copy.tokens if copy.tokens < known_tokens else known_tokens
                    twice_ms = self._duplicate_ms(tokens - held, copy)
                    if twice_ms > duplicate_ms:
                        duplicate_ms = twice_ms
        interference_ms = self._mu * prefill_ms * batch
        total_ms = queue_ms + compute_ms + network_ms + restore_ms
        total_ms += memory_ms + duplicate_ms + interference_ms
        return Option(
            action, worker, cached, queue_ms, compute_ms, network_ms, restore_ms, memory_ms,
            duplicate_ms, interference_ms, total_ms, cached - held, source,
        )  # fmt: skip

    def _duplicate_ms(self, tokens: int, copy: Copy) -> float:
        """Of so many tokens that `copy` holds too."""
        holder = copy.worker
        if tokens <= 0 or holder is None or copy.tier is not _DEVICE:
            return 0.0
        return self._held_twice_ms(tokens, holder)

    def _held_twice_ms(self, tokens: int, holder: Worker) -> float:
        return self._delta * holder.speed.sequence_bytes(tokens) * holder.occupancy


_CONTINUATION = TurnClass.DECODE_CONTINUATION
_DEVICE, _PEER = Tier.DEVICE, Tier.PEER
_DECODE = PlacementAction.DECODE_CONTINUATION
_COLOCATED = PlacementAction.COLOCATED_PREFILL
_REMOTE = PlacementAction.REMOTE_PREFILL
_MIGRATION = PlacementAction.STATE_MIGRATION
