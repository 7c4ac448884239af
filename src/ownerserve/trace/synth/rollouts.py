"""This module makes forked rollouts: n samples of one task at once, as RL training and best-of-n
search make them.

Each session is one task. Its n branches are agents that start with the same prompt at the same
time and then go apart, each in its own tool loop.
"""

from __future__ import annotations

import numpy as np

from ownerserve.trace.draft import end_s, settle
from ownerserve.trace.model import Agent, TraceRequest, TraceSession
from ownerserve.trace.synth.conversation import service_s
from ownerserve.trace.synth.draw import Draws, Quantiles
from ownerserve.trace.synth.options import Options
from ownerserve.trace.synth.prompt import BlockIds, Shared, SynthPrompt

# Assumed, in the range of public agentic-RL set-ups: 8 samples of a repository task.
BRANCHES = 8
HEAD_TOKENS = 2048
TASK = Quantiles(500, 700, 1500, 3000, 6000, 12000, 25000, 60000, 90000, 100000)
TURNS = Quantiles(1, 1, 3, 6, 12, 20, 30, 50, 60, 60)
ADDED = Quantiles(4, 8, 30, 120, 400, 1200, 3000, 11000, 30000, 40000)
WINDOW_TOKENS = 128_000
DECODE_S = 0.012
OUTPUT = Quantiles(20, 40, 80, 130, 260, 600, 1500, 5000, 8000, 12000)
THINK_S = Quantiles(0.05, 0.1, 0.3, 0.7, 1.5, 4, 12, 60, 120, 300)


class Rollouts:
    """The generator makes tasks. Owns block ids and the head that all tasks share."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._ids = BlockIds()
        self._heads = Shared(self._ids, options.block_tokens)

    def session(self, number: int, weight: float, *, rng: np.random.Generator) -> TraceSession:
        """Make task `number` with `weight` times the usual turns in every branch."""
        draws = Draws(rng)
        owner = () if draws.below(self._options.reuse) else (number,)
        prefix = self._heads.begin(owner, min(HEAD_TOKENS, self._options.max_input_tokens // 4))
        room = min(WINDOW_TOKENS, self._options.max_input_tokens) - prefix.tokens
        prefix.append(max(1, min(TASK.tokens(draws.next()), room // 2)))
        drafts: list[TraceRequest] = []
        for branch in range(BRANCHES):
            turns = max(1, round(TURNS.at(draws.next()) * weight))
            prompt = prefix.fork()
            if not draws.below(self._options.reuse):
                prompt.rewrite()
            self._branch(drafts, prompt, draws, agent=branch, turns=turns)
        agents = tuple(
            Agent(f"sample{branch}", "rollout", system_tokens=HEAD_TOKENS)
            for branch in range(BRANCHES)
        )
        return TraceSession(f"task{number}", settle(drafts), agents=agents)

    def _branch(
        self,
        drafts: list[TraceRequest],
        prompt: SynthPrompt,
        draws: Draws,
        *,
        agent: int,
        turns: int,
    ) -> None:
        start_s, think_s = 0.0, None
        window = min(WINDOW_TOKENS, self._options.max_input_tokens)
        task_tokens = prompt.tokens
        for turn in range(turns):
            if turn:
                think_s = round(THINK_S.at(draws.next()) * self._options.tool_time, 3)
                start_s = end_s(drafts[-1]) + think_s
                added = ADDED.tokens(draws.next()) + drafts[-1].output_tokens
                if not draws.below(self._options.reuse):
                    prompt.rewrite()
                if prompt.tokens + added > window:
                    prompt.rewind(task_tokens)
                prompt.append(min(added, window - prompt.tokens))
            answer = OUTPUT.tokens(draws.next())
            drafts.append(
                TraceRequest(
                    start_s=round(start_s, 3),
                    input_tokens=prompt.tokens,
                    output_tokens=answer,
                    runs=prompt.runs,
                    agent=agent,
                    think_s=think_s,
                    api_s=round(service_s(prompt.tokens, answer * DECODE_S), 3),
                    stop="tool_use" if turn < turns - 1 else "end_turn",
                    kind="rollout",
                )
            )
