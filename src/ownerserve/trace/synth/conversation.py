"""This module makes linear conversations: chat, thinking, SWE-like tasks, questions on long
documents.

One small model for the four: a session begins with a head (and a document, where there is one),
then each turn adds text and waits. A profile says how much of each; where its numbers come from
stands beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ownerserve.trace.draft import end_s
from ownerserve.trace.model import Agent, TraceRequest, TraceSession
from ownerserve.trace.synth.draw import Draws, Quantiles, zipf_weights
from ownerserve.trace.synth.options import Options
from ownerserve.trace.synth.prompt import BlockIds, Shared, SynthPrompt

# A mid-size model on one modern GPU: fixed cost, decode, uncached prefill (stated, not measured).
API_BASE_S, API_PER_INPUT_S = 0.3, 2e-5


class ConversationProfile(NamedTuple):
    """A profile describes one kind of conversation.

    A turn's prompt is the one before, `answer_returns` of its answer, and what was added; above
    `window` it falls back to the session's first prompt. `head` tokens are shared by all sessions,
    a document by some. `output_s`: decode a token.
    """

    turns: Quantiles
    first_user: Quantiles
    added: Quantiles
    output: Quantiles
    think_s: Quantiles
    stop: str
    window: int
    answer_returns: float = 1.0
    output_s: float = 0.012
    head: int = 0
    documents: int = 0
    document_tokens: Quantiles | None = None


CHAT = ConversationProfile(
    # Mooncake's conversation trace (turns, lengths, answers); its gaps are start to start.
    turns=Quantiles(1, 1, 1, 1, 1, 2, 3, 8, 17, 43),
    first_user=Quantiles(100, 380, 393, 824, 4750, 12500, 25000, 89000, 121000, 126000),
    added=Quantiles(8, 15, 25, 50, 120, 450, 4300, 17000, 39000, 92000),
    output=Quantiles(1, 3, 24, 156, 350, 472, 597, 1118, 2000, 2000),
    think_s=Quantiles(1, 10, 36, 58, 115, 256, 470, 1470, 2630, 3000),
    stop="end_turn",
    window=128_000,
    head=512,
)
THINKING = ConversationProfile(
    # Assumed: no thinking trace could be had. Short questions, answers of thousands of tokens,
    # of which the reasoning does not return with the next prompt.
    turns=Quantiles(1, 1, 1, 1, 1, 2, 4, 9, 15, 20),
    first_user=Quantiles(20, 30, 60, 150, 500, 1500, 4000, 20000, 40000, 60000),
    added=Quantiles(40, 80, 200, 350, 600, 1000, 2000, 6000, 12000, 16000),
    output=Quantiles(100, 300, 900, 1700, 3500, 7500, 14000, 30000, 40000, 64000),
    think_s=Quantiles(2, 8, 20, 45, 100, 240, 600, 1800, 3600, 7200),
    stop="end_turn",
    window=64_000,
    answer_returns=0.15,
    head=256,
)
SWE = ConversationProfile(
    # LMCache's mini-swe-agent runs: a small model, and a shell command that takes an instant.
    # Its recorded prompts leave answers out; here they return, as they do in the agent.
    turns=Quantiles(6, 6, 8, 11, 22, 30, 30, 30, 30, 30),
    first_user=Quantiles(1177, 1179, 1282, 1349, 1490, 2062, 2705, 3755, 3852, 3863),
    added=Quantiles(15, 15, 15, 15, 34, 214, 858, 3673, 3874, 3998),
    output=Quantiles(39, 45, 62, 78, 98, 130, 187, 301, 359, 372),
    think_s=Quantiles(0.05, 0.06, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 3.2),
    stop="tool_use",
    window=60_000,
    output_s=0.004,
)
SWE_LONG = ConversationProfile(
    # SWE-bench runs as seed 003 tells of them: 4,449 requests of 52 sessions, 58 to 150 turns each
    # where it names some, first prompts about 12k tokens, later ones 50k to 100k. What a turn adds
    # follows from these; answers and tools are assumed.
    turns=Quantiles(20, 25, 45, 60, 85, 112, 130, 149, 150, 150),
    first_user=Quantiles(4000, 5000, 6500, 7500, 8000, 9000, 10000, 12000, 13000, 14000),
    added=Quantiles(15, 20, 40, 100, 250, 700, 1600, 5000, 8000, 9000),
    output=Quantiles(20, 40, 60, 80, 110, 180, 400, 1500, 3000, 4000),
    think_s=Quantiles(0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 6.0, 30.0, 60.0, 90.0),
    stop="tool_use",
    window=100_000,
    output_s=0.006,
    head=4096,
)
LONGDOC = ConversationProfile(
    # Assumed: a few questions by different people on each of a few documents.
    turns=Quantiles(1, 1, 1, 2, 3, 5, 8, 15, 20, 20),
    first_user=Quantiles(8, 10, 15, 25, 40, 70, 120, 400, 800, 1000),
    added=Quantiles(20, 40, 100, 200, 300, 450, 700, 1500, 2500, 3000),
    output=Quantiles(10, 20, 60, 120, 220, 380, 600, 1200, 2000, 2000),
    think_s=Quantiles(2, 4, 10, 20, 45, 110, 300, 1500, 3600, 7200),
    stop="end_turn",
    window=1_000_000,
    head=512,
    documents=20,  # sessions a document, on average
    document_tokens=Quantiles(
        6000, 8000, 16000, 28000, 60000, 110000, 180000, 400000, 700000, 900000
    ),
)


class Conversations:
    """The generator makes sessions of one profile. Owns block ids, the head and the documents of
    one trace."""

    def __init__(self, profile: ConversationProfile, options: Options) -> None:
        self._profile, self._options = profile, options
        self._ids = BlockIds()
        self._shared = Shared(self._ids, options.block_tokens)
        self._popularity: list[float] = []
        if profile.documents:
            # Documents take the skew: popularity is what concentrates re-use here.
            count = max(1, options.sessions // profile.documents)
            weights = zipf_weights(count, options.skew)
            self._popularity = (np.cumsum(weights) / count).tolist()

    def session(self, number: int, weight: float, *, rng: np.random.Generator) -> TraceSession:
        """Make session `number` with `weight` times the usual turns, unless documents take the
        skew."""
        draws, profile = Draws(rng), self._profile
        prompt = self._begin(number, draws)
        agent = Agent("main", system_tokens=prompt.tokens)
        prompt.append(max(1, min(profile.first_user.tokens(draws.next()), self._room(prompt))))
        first_tokens = prompt.tokens
        turns = profile.turns.at(draws.next()) * (1.0 if self._popularity else weight)
        requests = [self._request(prompt, draws, start_s=0.0, think_s=None)]
        for _ in range(max(1, round(turns)) - 1):
            kept = round(requests[-1].output_tokens * profile.answer_returns)
            added = kept + profile.added.tokens(draws.next())
            self._grow(prompt, draws, added=added, floor=first_tokens)
            think_s = round(profile.think_s.at(draws.next()) * self._options.tool_time, 3)
            start_s = end_s(requests[-1]) + think_s
            requests.append(self._request(prompt, draws, start_s=start_s, think_s=think_s))
        return TraceSession(f"{number}", tuple(requests), agents=(agent,))

    def _request(
        self, prompt: SynthPrompt, draws: Draws, *, start_s: float, think_s: float | None
    ) -> TraceRequest:
        profile = self._profile
        answer = max(1, profile.output.tokens(draws.next()))
        return TraceRequest(
            start_s=round(start_s, 3),
            input_tokens=prompt.tokens,
            output_tokens=answer,
            runs=prompt.runs,
            think_s=think_s,
            api_s=round(service_s(prompt.tokens, answer * profile.output_s), 3),
            stop=profile.stop,
        )

    def _begin(self, number: int, draws: Draws) -> SynthPrompt:
        """Make the shared part of the prompt: head and document, or private ones without re-use."""
        profile = self._profile
        owner = () if draws.below(self._options.reuse) else (number,)
        key: tuple[object, ...] = ("head", *owner)
        tokens = profile.head
        if profile.document_tokens is not None:
            document = bisect_right(self._popularity[:-1], draws.next())
            own = Draws(np.random.Generator(np.random.PCG64([self._options.seed, document, 7])))
            key = ("document", document, *owner)
            tokens += profile.document_tokens.tokens(own.next())
        limit = min(profile.window, self._options.max_input_tokens)
        return self._shared.begin(key, min(tokens, limit // 2))

    def _grow(self, prompt: SynthPrompt, draws: Draws, *, added: int, floor: int) -> None:
        if not draws.below(self._options.reuse):
            prompt.rewrite()
        if self._room(prompt) < added:
            prompt.rewind(floor)
        prompt.append(max(0, min(added, self._room(prompt))))

    def _room(self, prompt: SynthPrompt) -> int:
        return min(self._profile.window, self._options.max_input_tokens) - prompt.tokens


def service_s(input_tokens: int, decode_s: float) -> float:
    """Return a stated service time in seconds, so that generated starts are spaced like real
    ones."""
    return API_BASE_S + API_PER_INPUT_S * input_tokens + decode_s
