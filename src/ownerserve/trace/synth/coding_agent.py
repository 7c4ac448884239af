"""This module makes coding agents as measured: 570 Claude-Code sessions (docs/traces.md,
"calibration").

Each table below is that trace's own percentiles (0, 1, 10, 25, 50, 75, 90, 99, 99.9, 100) of one
quantity of main agents; what joins them is a small model:

- a turn's prompt is the one before, its answer, and what the tool or the person added; with
  measured chance it is instead rebuilt from an early point (edited history) or, above the
  window, compacted;
- stop reasons are a Markov chain; think time and answer length depend on the stop reason;
- prompts begin with a head of tool and system tokens that sessions of one client version share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ownerserve.trace.draft import end_s, settle
from ownerserve.trace.model import Agent, TraceRequest, TraceSession
from ownerserve.trace.synth.draw import Draws, Quantiles
from ownerserve.trace.synth.options import Options
from ownerserve.trace.synth.prompt import BlockIds, Shared, SynthPrompt

# A context that is long from the start was resumed, and has few turns left.
TURNS_FRESH = Quantiles(3, 3.2, 11, 22, 51, 101.5, 188, 329, 427, 439)
TURNS_RESUMED = Quantiles(3, 3, 4, 6, 17, 35.5, 56, 129, 150, 152)
RESUMED_TOKENS = 120_000
FIRST_INPUT = Quantiles(8979, 10145, 14626, 18795, 61120, 125161, 293520, 739733, 848450, 851858)
# What a turn adds beside the answer before it. (8.5 % of measured turns add less than nothing,
# since old reasoning is dropped; here an answer always returns whole.)
ADDED = Quantiles(4, 5, 7, 72, 314, 956, 2728, 14088, 73223, 234962)
TOOLS = Quantiles(7401, 7655, 9292, 10370, 11899, 12439, 12974, 15177, 16556, 17261)
SYSTEM = Quantiles(498, 716, 1906, 2328, 2774, 2994, 3767, 5964, 6766, 6767)

# Next stop reason by the one before ("" = a streamed request whose reason was not recorded).
STOPS = ("tool_use", "end_turn", "")
NEXT_STOP = {
    "tool_use": (0.8945, 0.0551, 0.0504),
    "end_turn": (0.7780, 0.1629, 0.0591),
    "": (0.3208, 0.0494, 0.6298),
}
OUTPUT = {
    "tool_use": Quantiles(35, 70, 109, 141, 225, 450, 950, 3743, 7016, 18195),
    "end_turn": Quantiles(2, 16, 116, 277, 431, 611, 908, 2363, 5512, 6390),
    "": Quantiles(1, 57, 92, 116, 171, 317, 700, 3825, 8068, 10411),
}
THINK_S = {
    "tool_use": Quantiles(0.5, 2, 4, 6, 9, 19, 66, 661, 3196, 37415),
    "end_turn": Quantiles(0.5, 2.1, 11, 87, 257, 1056, 3452, 41014, 73029, 77589),
    "": Quantiles(0.5, 1.2, 2.9, 4.1, 7.2, 16.9, 65.9, 945, 2919, 3170),
}
# Service time by least squares on the trace; the residual's factor as measured.
API_BASE_S, API_PER_OUTPUT_S, API_PER_INPUT_S = 1.55, 0.0146, 1.51e-5
API_FACTOR = Quantiles(0.28, 0.55, 0.71, 0.80, 0.93, 1.11, 1.30, 1.82, 5.48, 20)

REBUILD_CHANCE = 891 / 35479
REBUILD_KEEPS = Quantiles(0, 0, 0.04, 0.10, 0.22, 0.97, 0.98, 0.99, 0.995, 1)
WINDOW_TOKENS, LARGE_WINDOW_TOKENS = 155_000, 900_000
LARGE_WINDOW_CHANCE = 0.2  # of sessions that begin within the small window
COMPACTED_TO = Quantiles(9903, 10119, 13493, 23820, 36082, 56356, 70277, 89827, 106585, 109601)

HEADS_PER_SESSION = 265 / 570  # distinct (tools, system, model) triples
MODELS = ("large", "medium", "older")

SUB_SESSION_CHANCE = 17 / 570
SUB_SPAWN_CHANCE = 0.03  # per tool_use of such a session
SUB_WIDTH = (0.62, 0.26, 0.12)  # one, two, three at once
SUB_TURNS = Quantiles(2, 3, 5, 7, 11, 13, 17, 24, 24, 24)
SUB_FIRST_USER = Quantiles(20, 30, 100, 300, 800, 1800, 3000, 9000, 9200, 9300)
SUB_ADDED = Quantiles(20, 30, 200, 650, 2250, 5450, 12700, 62000, 90000, 120000)
SUB_THINK_S = Quantiles(1, 1.1, 2, 3, 4, 6, 29, 75, 127, 133)
SUB_HEAD = (8306, 736)
SPAWN_S = 0.5


class Head(NamedTuple):
    """A head is what sessions of one client version begin with."""

    tools: int
    system: int
    model: str


class CodingAgent:
    """The generator makes coding agents' sessions. Owns block ids and the shared heads of one
    trace."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._ids = BlockIds()
        self._heads = Shared(self._ids, options.block_tokens)
        self._head_count = max(1, round(options.sessions * HEADS_PER_SESSION))

    def session(self, number: int, weight: float, *, rng: np.random.Generator) -> TraceSession:
        """Make session `number` with `weight` times the usual number of turns."""
        draws = Draws(rng)
        head = self._head(draws)
        shared = draws.below(self._options.reuse)
        prompt = self._begin(head, () if shared else (number,))
        first = min(FIRST_INPUT.tokens(draws.next()), self._options.max_input_tokens)
        turns = (TURNS_RESUMED if first >= RESUMED_TOKENS else TURNS_FRESH).at(draws.next())
        prompt.append(max(1, first - prompt.tokens))
        run = _Run(self, prompt, draws, window=self._window(first, draws), number=number)
        run.main(turns=max(1, round(turns * weight)), model=head.model)
        main = Agent("main", "", head.model, head.tools, head.system)
        return TraceSession(f"agent{number}", settle(run.drafts), agents=(main, *run.sub_agents))

    def begin_sub_agent(self, owner: int, draws: Draws) -> SynthPrompt:
        """Make a sub-agent's first prompt: its own, smaller head, then the task."""
        key = () if draws.below(self._options.reuse) else (owner, draws.next())
        prompt = self._begin(Head(*SUB_HEAD, "small"), key)
        prompt.append(SUB_FIRST_USER.tokens(draws.next()))
        return prompt

    @property
    def options(self) -> Options:
        """`options` are what the workload was asked for."""
        return self._options

    def _head(self, draws: Draws) -> Head:
        # Popularity of versions is nearly flat: the most used has 16 of 570 sessions.
        version = int(self._head_count * draws.next() ** 1.5)
        own = Draws(np.random.Generator(np.random.PCG64([self._options.seed, version, 7])))
        tools, system = TOOLS.tokens(own.next()), SYSTEM.tokens(own.next())
        return Head(tools, system, MODELS[int(own.next() * len(MODELS))])

    def _begin(self, head: Head, owner: tuple[object, ...]) -> SynthPrompt:
        return self._heads.begin((head, owner), head.tools + head.system)

    def _window(self, first_tokens: int, draws: Draws) -> int:
        large = draws.below(LARGE_WINDOW_CHANCE) or first_tokens > WINDOW_TOKENS
        window = LARGE_WINDOW_TOKENS if large else WINDOW_TOKENS
        return min(window, self._options.max_input_tokens)


class _Run:
    """A run is one session while it is made: its drafts, its clock, its prompt."""

    def __init__(
        self, maker: CodingAgent, prompt: SynthPrompt, draws: Draws, *, window: int, number: int
    ) -> None:
        self._maker, self._prompt, self._draws = maker, prompt, draws
        self._window, self._number = window, number
        self.drafts: list[TraceRequest] = []
        self.sub_agents: list[Agent] = []

    def main(self, *, turns: int, model: str) -> None:
        """Draft the main agent's conversation; sub-agents are drafted as they are spawned."""
        draws = self._draws
        spawns = draws.below(SUB_SESSION_CHANCE)
        stop = "tool_use"
        previous: int | None = None
        joins: list[int] = []
        for turn in range(turns):
            think_s = self._think(THINK_S[stop]) if previous is not None else None
            if previous is not None:
                self._grow(self.drafts[previous].output_tokens)
            stop = self._next_stop(stop)
            if turn == turns - 1 and draws.below(0.5):
                stop = "end_turn"
            waits = () if previous is None else (previous, *joins)
            ready_s = max((end_s(self.drafts[wait]) for wait in waits), default=0.0)
            self._draft(
                self._prompt,
                OUTPUT[stop],
                start_s=ready_s + (think_s or 0.0),
                after=waits if joins else None,
                think_s=think_s,
                stop=stop,
                model=model,
            )
            previous, joins = len(self.drafts) - 1, []
            last = turn == turns - 1
            if spawns and stop == "tool_use" and not last and draws.below(SUB_SPAWN_CHANCE):
                joins = [self._sub_agent(previous) for _ in range(self._width())]

    def _grow(self, answer_tokens: int) -> None:
        """Make the next turn's prompt: appended to, rebuilt, or compacted."""
        draws, prompt, reuse = self._draws, self._prompt, self._maker.options.reuse
        before = prompt.tokens
        growth = ADDED.tokens(draws.next()) + answer_tokens
        keep = REBUILD_KEEPS.at(draws.next())
        if not draws.below(reuse):
            prompt.rewrite()
        elif draws.below(REBUILD_CHANCE):
            prompt.rewind(int(before * keep))
            prompt.append(before - prompt.tokens)
        if prompt.tokens + growth > self._window:
            compacted = min(COMPACTED_TO.tokens(draws.next()), self._window // 2)
            prompt.rewind(min(compacted // 2, sum(SUB_HEAD)))
            prompt.append(compacted - prompt.tokens)
            growth = min(growth, self._window // 2)
        prompt.append(growth)

    def _sub_agent(self, spawner: int) -> int:
        """Draft a sub-agent's whole conversation; returns its last draft."""
        draws, agent = self._draws, len(self.sub_agents) + 1
        name, kind = f"sub{agent}", "explore"
        self.sub_agents.append(Agent(name, kind, "small", *SUB_HEAD))
        prompt = self._maker.begin_sub_agent(self._number, draws)
        turns = SUB_TURNS.tokens(draws.next())
        for turn in range(turns):
            if turn:
                growth = SUB_ADDED.tokens(draws.next()) + self.drafts[-1].output_tokens
                prompt.append(min(growth, max(1, self._window - prompt.tokens)))
            wait = spawner if turn == 0 else len(self.drafts) - 1
            think_s = SPAWN_S if turn == 0 else self._think(SUB_THINK_S)
            self._draft(
                prompt,
                OUTPUT["tool_use"],
                start_s=end_s(self.drafts[wait]) + think_s,
                after=(spawner,) if turn == 0 else None,
                think_s=think_s,
                stop="tool_use" if turn < turns - 1 else "end_turn",
                model="small",
                agent=agent,
            )
        return len(self.drafts) - 1

    def _draft(
        self,
        prompt: SynthPrompt,
        output: Quantiles,
        *,
        start_s: float,
        after: tuple[int, ...] | None,
        think_s: float | None,
        stop: str,
        model: str,
        agent: int = 0,
    ) -> None:
        answer = max(1, output.tokens(self._draws.next()))
        factor = API_FACTOR.at(self._draws.next())
        api_s = API_BASE_S + API_PER_OUTPUT_S * answer + API_PER_INPUT_S * prompt.tokens
        self.drafts.append(
            TraceRequest(
                start_s=round(start_s, 3),
                input_tokens=prompt.tokens,
                output_tokens=answer,
                runs=prompt.runs,
                agent=agent,
                after=after,
                think_s=think_s,
                api_s=round(api_s * factor, 3),
                stop=stop,
                model=model,
            )
        )

    def _think(self, after_stop: Quantiles) -> float:
        return round(after_stop.at(self._draws.next()) * self._maker.options.tool_time, 3)

    def _next_stop(self, stop: str) -> str:
        u = self._draws.next()
        tool, end, _ = NEXT_STOP[stop]
        return STOPS[0] if u < tool else STOPS[1] if u < tool + end else STOPS[2]

    def _width(self) -> int:
        u = self._draws.next()
        return 1 if u < SUB_WIDTH[0] else 2 if u < SUB_WIDTH[0] + SUB_WIDTH[1] else 3
