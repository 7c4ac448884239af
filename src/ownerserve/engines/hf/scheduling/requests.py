"""Requests are what a caller asks of the engine; stream events are what it hears back.

Plain values that cross between the asyncio side and the engine thread. Never a tensor, a socket or
a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, ExecutionMode
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import NO_NONCE, Nonce
from ownerserve.node.vocabulary.chains import PromptPrefix


class FinishReason(StrEnum):
    """A `FinishReason` says why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """A `Sampling` says how the next token is chosen.

    `temperature` 0 is greedy. `top_k` 0 keeps all. `logprobs` None gives none, n >= 0 the chosen
    token's and the n best. Choice i of a request draws from a generator seeded `seed + i`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """A `Stopping` says when a choice ends.

    A stop string is cut from the text. End-of-sequence and `token_ids` end a choice once it has
    `min_tokens`; they count as completion tokens and add no text. `eos_token_ids` is empty when
    the caller ignores end-of-sequence.
    """

    max_tokens: int
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()


class Envelope(msgspec.Struct, frozen=True):
    """An `Envelope` is what every object of one answer repeats."""

    id: str
    created_s: int
    model: str


class ResponseOptions(msgspec.Struct, frozen=True):
    """`ResponseOptions` say what the caller wants to see beside the text."""

    token_ids: bool
    stream_usage: bool


class AnswerForm(msgspec.Struct, frozen=True):
    """An `AnswerForm` is how a turn is answered: by the endpoint of that name, as a stream or
    whole."""

    endpoint: str
    is_streamed: bool
    envelope: Envelope
    options: ResponseOptions


class TextState(msgspec.Struct, frozen=True):
    """A `TextState` is where the text of a choice stands amid its tokens: the `window` that is
    decoded anew with the next one, how many of its characters were `given` out, and what is `held`
    back as the possible beginning of a stop string."""

    window: tuple[int, ...] = ()
    given: int = 0
    held: str = ""


class SaidSoFar(msgspec.Struct, frozen=True):
    """A `SaidSoFar` is what a choice has said at another worker, where it was stopped: the tokens
    of its answer, its text, its sampler's generator (empty: it is greedy), and how many tokens of
    the prompt were cached there. `whole`: all of it as one delta, of an answer that is not streamed
    and that nobody has got."""

    tokens: tuple[int, ...]
    text: TextState
    generator: bytes
    cached_tokens: int
    whole: Delta | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An `EngineRequest` is one prompt and `choices` continuations of it. `is_final`: its session
    ends with it. `is_named`: a gateway named the session, which can be owned then; `parent` is the
    session that it was forked from, `group` names sessions that share a head, `epoch` is the
    highest under which the gateway knows the session to be owned, `version` how many turns it knows
    its owners to have finished.

    `reservation` is the place that admission holds for it; None: it comes without one. One that
    `is_judged` is refused at its arrival when it would wait for long; others take their chance.
    `prefix`: the prompt's digests, where somebody has made them on the way. State is shared by
    those of one `cache_salt` alone, and by those who have none. `bring_from` is who lends
    what it holds of the prompt, of the session `lent_as` where that is another; `decode_from` is
    who is to compute it, maybe in a gateway's `leg` of that number as well: one that `is_prefill`,
    which computes the prompt and answers nothing. One that `begins` a prompt of so many tokens is
    computed for another worker: in the pieces of that prompt, without an answer.

    One that came through a gateway bears the id that this `told_id` it by, and the `form` of its
    answer: so it can go on elsewhere. One that goes on here has `said` so much: the prompt ends
    with that.
    """

    request_id: str
    prompt: Sequence[int]
    stopping: Stopping
    sampling: Sampling = Sampling()
    choices: int = 1
    session_id: str | None = None
    is_final: bool = False
    is_named: bool = False
    parent: SessionId | None = None
    group: str = ""
    epoch: Epoch | None = None
    version: int = 0
    reservation: int | None = None
    is_judged: bool = False
    bring_from: LenderAddress | None = None
    lent_as: SessionId | None = None
    decode_from: LenderAddress | None = None
    leg: Nonce = NO_NONCE
    is_prefill: bool = False
    begins: int = 0
    prefix: PromptPrefix | None = None
    cache_salt: str = ""
    told_id: str = ""
    form: AnswerForm | None = None
    said: SaidSoFar | None = None

    @property
    def said_tokens(self) -> int:
        """`said_tokens` counts the tokens of the answer that the prompt ends with."""
        return 0 if self.said is None else len(self.said.tokens)

    @property
    def prompt_tokens(self) -> int:
        """`prompt_tokens` counts the tokens that the caller sent."""
        return len(self.prompt) - self.said_tokens

    @property
    def new_tokens(self) -> int:
        """`new_tokens` counts the tokens that may still be sampled for a choice."""
        return self.stopping.max_tokens - self.said_tokens


class Facts(msgspec.Struct, frozen=True):
    """`Facts` are what a request is checked against."""

    model: str
    vocab_size: int
    sequence_tokens: int
    eos_token_ids: frozenset[int]
    block_tokens: int


class TokenLogprob(msgspec.Struct, frozen=True):
    """A `TokenLogprob` is a token and its natural-log probability under the unmodified
    distribution."""

    token: int
    logprob: float


class Sampled(msgspec.Struct, frozen=True):
    """A `Sampled` is one chosen token; `chosen` and `top` are set when log-probabilities were asked
    for."""

    token: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


class Admitted(msgspec.Struct, frozen=True):
    """Event: the request left the queue; `cached_tokens` of its prompt need no compute.

    `replayed_tokens` more are computed over kept range state, to rebuild windows. `restore` names
    what was done to bring state back, in the planner's words; `plan` is the price of what was
    loaded, in one line. `lost_tokens` were left by the session's last turn and were not at hand.
    `brought` are the tokens that were loaded, by where they came from.
    """

    cached_tokens: int
    mode: ExecutionMode
    replayed_tokens: int = 0
    restore: str = ""
    plan: str = ""
    lost_tokens: int = 0
    brought: Mapping[str, int] = {}


class Delta(msgspec.Struct, frozen=True):
    """Event: one step added this to choice `index`.

    `text` may lag behind `sampled`: an unfinished UTF-8 character or a possible stop string is
    held back. The delta with a `finish` is the choice's last.
    """

    index: int
    text: str
    sampled: tuple[Sampled, ...]
    finish: FinishReason | None = None


class RequestFinished(msgspec.Struct, frozen=True):
    """Event: all choices of the request ended."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class RequestFailed(msgspec.Struct, frozen=True):
    """Event: the request ends without (or in the middle of) an answer."""

    reason: WorkerRefusal
    message: str


class RequestMoved(msgspec.Struct, frozen=True):
    """Event: the request goes on at another worker, behind so many tokens of its answer."""

    tokens: int


StreamEvent = Admitted | Delta | RequestFinished | RequestFailed | RequestMoved
"""In order: Admitted, Delta ..., Finished or Moved; or Failed at any point. Nothing follows `LAST`
ones."""
LAST = RequestFinished | RequestFailed | RequestMoved
