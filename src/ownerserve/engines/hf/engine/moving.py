"""Turns move amid their answers: what the reference engine gives of one that it stops, and how it
reads what another has stopped. The messages are node/transfers/turn_moves.py's.

`MovableTurns` is called on the engine's thread, between two steps; what reads a state, on any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import torch

from ownerserve.engines.hf.model.runner import Sampler, takes_state
from ownerserve.engines.hf.model.text import Choice
from ownerserve.engines.hf.scheduling.requests import (
    Delta,
    EngineRequest,
    Facts,
    RequestMoved,
    SaidSoFar,
    Sampled,
    StreamEvent,
)
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, pack, unpack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.node.transfers.turn_moves import StoppedTurn
from ownerserve.node.vocabulary.chains import PromptPrefix

STATE_VERSION = 1


class LiveRequest(msgspec.Struct, eq=False):
    """A `LiveRequest` is a request on its way; `open` counts its choices that have not ended.
    `first_choice` are the tokens of the first, which a session goes on from; `unsent` its deltas,
    of an answer that is not streamed and may go on elsewhere."""

    request: EngineRequest
    prompt: PromptPrefix
    arrived_s: float
    open: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_choice: list[int] = []
    unsent: list[Delta] = []

    @property
    def keeps_deltas(self) -> bool:
        """`keeps_deltas` tells whether whoever goes on with it needs what nobody has got yet."""
        form = self.request.form
        return form is not None and not form.is_streamed


class Voice(msgspec.Struct, eq=False):
    """A `Voice` is one choice of a live request: what draws its tokens and what turns them into
    text."""

    live: LiveRequest
    choice: Choice
    sampler: Sampler


class _State(msgspec.Struct, frozen=True, array_like=True):
    """The state of a stopped turn: the request, whose prompt is `tokens`, packed, with the answer
    so far at its end."""

    version: int
    model: str
    request: EngineRequest
    tokens: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_State)

Leave = Callable[[str, StreamEvent], None]


class MovableTurns:
    """`MovableTurns` are the turns of one engine that may go on elsewhere: of one choice, that came
    through a gateway and write their answer. `leave` ends a request with an event."""

    def __init__(
        self,
        model: str,
        live: Mapping[str, LiveRequest],
        voices: Mapping[TurnId, Voice],
        *,
        scheduler: Scheduler,
        leave: Leave,
    ) -> None:
        self._model = model
        self._live = live
        self._voices = voices
        self._scheduler = scheduler
        self._leave = leave

    def stop(self, turn: str) -> StoppedTurn | WorkerRefusal:
        """Stop the turn of the request that its gateway calls so, or say why not."""
        found = [one for one in self._live.values() if turn and one.request.told_id == turn]
        if not found:
            return WorkerRefusal.UNKNOWN_TURN
        live = found[0]
        request = live.request
        if len(found) > 1 or request.form is None or request.choices > 1:
            return WorkerRefusal.NOT_MOVABLE
        turn_id = TurnId(f"{request.request_id}.0")
        if not self._scheduler.stop(turn_id, time.monotonic()):
            return WorkerRefusal.NOT_DECODING
        state = self._state(live, self._voices[turn_id])
        told = 0 if live.keeps_deltas else live.completion_tokens
        return StoppedTurn(request.request_id, told, state)

    def go_on(self, stopped: StoppedTurn) -> None:
        """Let a stopped turn go on here; one that was aborted meanwhile is no error."""
        self._scheduler.release(TurnId(f"{stopped.request_id}.0"))

    def moved(self, stopped: StoppedTurn) -> None:
        """End a stopped turn, which is another's; one that was aborted meanwhile is no error."""
        if stopped.request_id in self._live:
            self._leave(stopped.request_id, RequestMoved(stopped.tokens))

    def _state(self, live: LiveRequest, voice: Voice) -> bytes:
        request, before = live.request, live.request.said
        tokens = (*(() if before is None else before.tokens), *live.first_choice)
        said = SaidSoFar(
            tokens,
            voice.choice.text_state(),
            voice.sampler.state(),
            live.cached_tokens,
            _joined(live.unsent) if live.keeps_deltas else None,
        )
        asked = msgspec.structs.replace(
            request,
            prompt=(),
            prefix=None,
            reservation=None,
            is_judged=False,
            bring_from=None,
            lent_as=None,
            decode_from=None,
            said=said,
        )
        whole = pack(request.prompt) + pack(live.first_choice)
        return _encoder.encode(_State(STATE_VERSION, self._model, asked, whole))


def _joined(deltas: list[Delta]) -> Delta:
    sampled: tuple[Sampled, ...] = tuple(token for delta in deltas for token in delta.sampled)
    return Delta(0, "".join(delta.text for delta in deltas), sampled)


def check_state(state: bytes, facts: Facts, device: torch.device) -> WorkerRefusal | None:
    """Say why a turn can't go on here from that state; any thread may call."""
    try:
        found = _decoder.decode(state)
    except msgspec.DecodeError:
        return WorkerRefusal.MALFORMED
    request, said = found.request, found.request.said
    count, rest = divmod(len(found.tokens), TOKEN_BYTES)
    if rest or (found.version, found.model) != (STATE_VERSION, facts.model) or said is None:
        return WorkerRefusal.MALFORMED
    if not 0 < len(said.tokens) < min(count, request.stopping.max_tokens):
        return WorkerRefusal.MALFORMED
    if request.form is None or max(unpack(found.tokens)) >= facts.vocab_size:
        return WorkerRefusal.MALFORMED
    if request.sampling.temperature > 0 and not takes_state(said.generator, device):
        return WorkerRefusal.MALFORMED
    is_too_long = count + request.new_tokens - 1 > facts.sequence_tokens
    return WorkerRefusal.TOO_LONG if is_too_long else None


def request_of(state: bytes, *, request_id: str, source: LenderAddress) -> EngineRequest:
    """Return the request that goes on from a state that was checked, its blocks brought from
    `source`."""
    found = _decoder.decode(state)
    tokens = unpack(found.tokens)
    return msgspec.structs.replace(
        found.request, request_id=request_id, prompt=tokens, bring_from=source
    )
