"""A hot spot is relieved here, and a worker leaves amid an answer: sessions move with their state.

    worker 0   has the most sessions, forks of one head. They come back at once ──> some go over
               ... then it is told to leave while it writes an answer ────> the answer and all
    worker 1   ................................................. goes on with them. Worker 0 exits

Then the same turns run on one worker that nobody disturbs: the answers are compared with its.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec

from ownerserve.cli.demo.compare import Comparison, compare
from ownerserve.cli.demo.drive import REQUEST_TIMEOUT_S, TurnAnswer, ask
from ownerserve.cli.demo.fleets import DemoRun
from ownerserve.cli.demo.forked import forked
from ownerserve.cli.demo.processes import DemoFleet
from ownerserve.cli.demo.run import dispatches, peer_bytes
from ownerserve.cli.demo.workload import Message, Transcript, text_of
from ownerserve.kv.units import format_bytes
from ownerserve.kv.wire.headers import REASON_HEADER

SESSIONS, BURSTS = 6, 2
HEAD_TOKENS, ADDED_TOKENS = 600, 400
ANSWER_TOKENS, LONG_ANSWER_TOKENS = 8, 300
LEAVES_AFTER = 12
"""So many tokens of the long answer are there, or a few more, when its worker is told to leave."""
LEAVE_S = 60.0
POLL_S = 0.05
KEEPS = ("--kv-memory", "64MiB", "--host-cache", "64MiB", "--drain-timeout", f"{LEAVE_S:g}")
IMPATIENT = ("--hot-ms", "50", "--cool-s", "0", "--receipts", "open")
"""A gateway to which these few short turns are a hot worker."""


Script = list[tuple[str, int]]
"""Which session was asked for how many tokens, in the order of their requests."""


class HotSpot(msgspec.Struct):
    """A hot spot is one policy's run of the scene.

    `left`: turns of the bursts that ran at another worker than their session's one before, and
    `by_heat` how many of them by the gateway's count; `peer_bytes`: what workers read of each
    other. Of the long answer: the tokens that were there when its worker was told to leave, whether
    it `moved`, and how long its client had nothing, at most. `settled`: sessions that stood at the
    worker that left; `cached` of `known` tokens were at hand in the turns after it, of what was
    known before each.
    """

    policy: str
    left: int = 0
    by_heat: int = 0
    peer_bytes: int = 0
    tokens: int = 0
    tokens_before: int = 0
    moved: bool = False
    longest_pause_ms: float = 0.0
    settled: int = 0
    cached: int = 0
    known: int = 0
    exit_code: int | None = None
    errors: list[str] = []
    compared: Comparison = msgspec.field(default_factory=Comparison)

    def lines(self) -> list[str]:
        """Return the lines that tell people of it."""
        went = "went on at another worker" if self.moved else "ended where it was"
        word = "equal" if self.compared.equal else "DIFFERENT"
        return [
            f"{self.policy}: a worker's sessions come back at once, {BURSTS} times: {self.left} of"
            f" these turns ran elsewhere, {self.by_heat} since it was hot;"
            f" {format_bytes(self.peer_bytes)} read of peers in all",
            f"  told to leave after {self.tokens_before} of {self.tokens} tokens of an answer, it"
            f" exits with {self.exit_code}: the answer {went}, its client had nothing for"
            f" {self.longest_pause_ms:.0f} ms at most; {self.settled} sessions stood there, of all"
            f" {self.cached:,} of {self.known:,} known tokens were at hand in their next turns",
            f"  answers beside those of one undisturbed worker: {word}"
            f" ({self.compared.tokens_compared:,} tokens, {self.compared.missing} missing,"
            f" {len(self.errors)} errors)",
        ]


class _Agent:
    """An agent has a session: its context, and where its last turn ran."""

    def __init__(
        self, client: httpx.AsyncClient, name: str, model: str, said: Transcript, asked: Script
    ) -> None:
        self._client, self._name, self._model = client, name, model
        self._said, self._asked = said, asked
        self._messages: list[Message] = []
        self.answers: list[TurnAnswer] = []

    @property
    def at(self) -> str:
        """`at` is the worker that took its last turn."""
        return self.answers[-1].worker

    async def turn(
        self,
        tokens: int = ANSWER_TOKENS,
        *,
        on_line: Callable[[TurnAnswer, str], None] = lambda answer, line: None,
    ) -> TurnAnswer:
        """Say something new, and keep what is answered: what the first run was."""
        number = len(self.answers)
        text = text_of(f"{self._name}/{number}", ADDED_TOKENS)
        head = Message("system", text_of("head", HEAD_TOKENS))
        self._messages.append(Message("user", text) if number else head)
        self._asked.append((self._name, tokens))
        answer = TurnAnswer(session=self._name, turn=number)
        body = {"model": self._model, "max_tokens": tokens, "ignore_eos": True}
        body["messages"] = [{"role": m.role, "content": m.text} for m in self._messages]
        await ask(
            self._client,
            answer,
            body,
            {"x-session-id": self._name},
            on_line=lambda line: on_line(answer, line),
        )
        said = self._said.setdefault((self._name, number), answer.text)
        self._messages.append(Message("assistant", said))
        self.answers.append(answer)
        return answer


class _Scene:
    """A scene is played over one fleet. Owns what came of it, and the script: who was asked in
    which order for how many tokens."""

    def __init__(self, policy: str, fleet: DemoFleet, model: str, said: Transcript) -> None:
        self.spot = HotSpot(policy)
        self.script: Script = []
        self._fleet, self._model, self._said = fleet, model, said
        self._agents: dict[str, _Agent] = {}

    @property
    def answers(self) -> list[TurnAnswer]:
        """`answers` are those of all sessions."""
        return [answer for agent in self._agents.values() for answer in agent.answers]

    async def play(self, act: Callable[[Sequence[_Agent]], Coroutine[None, None, None]]) -> None:
        """Let `act` have the agents act, all at this fleet's gateway."""
        limits = httpx.Limits(max_connections=None)
        url, told = self._fleet.gateway_url, (self._model, self._said, self.script)
        async with httpx.AsyncClient(
            base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False
        ) as client:
            names = [f"hot-{number}" for number in range(SESSIONS)]
            self._agents = {name: _Agent(client, name, *told) for name in names}
            await act(list(self._agents.values()))

    async def crowded(self, agents: Sequence[_Agent]) -> None:
        """Have a hot spot, then an answer amid which the worker leaves, and all go on; no further
        than something fails."""
        for act in (self._begin, *(self._burst,) * BURSTS, self._leave, self._go_on):
            await act(agents)
            self.spot.errors += [answer.error for answer in self.answers if answer.error]
            if self.spot.errors:
                return
        self.spot.by_heat = dispatches(self._fleet.admin_url).get("hot_owner", 0)

    async def _begin(self, agents: Sequence[_Agent]) -> None:
        for agent in agents:  # one after the other: each finds the head, and nobody is busy
            await agent.turn()

    async def _burst(self, agents: Sequence[_Agent]) -> None:
        """Have all sessions come back at once that stand where most do."""
        [(crowded, _count)] = Counter(agent.at for agent in agents).most_common(1)
        there = [agent for agent in agents if agent.at == crowded]
        await asyncio.gather(*(agent.turn() for agent in there))
        self.spot.left += sum(agent.at != crowded for agent in there)

    async def _go_on(self, agents: Sequence[_Agent]) -> None:
        """Have all sessions come back, of which the leaving worker's stand elsewhere."""
        self.spot.known = sum(_known(agent) for agent in agents)
        await asyncio.gather(*(agent.turn() for agent in agents))
        self.spot.cached = sum(agent.answers[-1].cached_tokens for agent in agents)

    async def _leave(self, agents: Sequence[_Agent]) -> None:
        """Have a long answer written, of a session where most stand, and the worker that writes it
        leave amid it: for heat it may be another."""
        [(crowded, _count)] = Counter(agent.at for agent in agents).most_common(1)
        writer = next(agent for agent in agents if agent.at == crowded)
        read_before = {name: peer_bytes(f"http://{name}") for name in self._fleet.workers}
        last_s = time.perf_counter()

        def read(answer: TurnAnswer, line: str) -> None:
            nonlocal last_s
            now_s = time.perf_counter()
            if self.spot.tokens_before:
                pause_ms = (now_s - last_s) * 1e3
                self.spot.longest_pause_ms = max(self.spot.longest_pause_ms, pause_ms)
            elif len(answer.tokens) >= LEAVES_AFTER:  # several may come at once
                self.spot.tokens_before = len(answer.tokens)
                self._fleet.workers[answer.worker].process.send_signal(signal.SIGTERM)
            last_s = now_s
            self.spot.moved |= line.startswith(":") and f"{REASON_HEADER}: moved" in line

        answer = await writer.turn(LONG_ANSWER_TOKENS, on_line=read)
        self.spot.tokens = len(answer.tokens)
        if not self.spot.tokens_before:
            return  # it was not told to: the answer says why
        name = writer.at
        self.spot.settled = sum(agent.at == name for agent in agents)
        leaving = self._fleet.workers[name].process
        until_s = time.monotonic() + 2 * LEAVE_S
        while (code := leaving.poll()) is None and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
        self.spot.exit_code = code
        if code is None:
            self.spot.errors.append(f"{name} was told to leave, and has not ended")
        others = [other for other in self._fleet.workers if other != name]
        read_after = sum(peer_bytes(f"http://{other}") for other in others)
        self.spot.peer_bytes = read_before[name] + read_after

    async def again(self, script: Script) -> None:
        """Ask for what `script` says, one after the other."""

        async def act(agents: Sequence[_Agent]) -> None:
            for name, tokens in script:
                await self._agents[name].turn(tokens)

        await self.play(act)


def _known(agent: _Agent) -> int:
    """Return the tokens of the agent's context that are state somewhere: all but its last one."""
    last = agent.answers[-1]
    return last.prompt_tokens + max(0, len(last.tokens) - 1)


def hot_spot(policy: str, *, model: str, workers: int) -> HotSpot:
    """Play the scene by `policy` on fresh workers, two or more, and then on one alone, with whose
    answers the others are compared. Raises PeerLost."""
    said: Transcript = {}
    with _fleet(policy, workers, model) as fleet:
        scene = _Scene(policy, fleet, model, said)
        asyncio.run(scene.play(scene.crowded))
    with _fleet("round_robin", 1, model) as fleet:
        alone = _Scene(policy, fleet, model, said)
        asyncio.run(alone.again(scene.script))
    scene.spot.compared = compare(alone.answers, scene.answers)
    return scene.spot


@contextmanager
def _fleet(policy: str, workers: int, model: str) -> Iterator[DemoFleet]:
    with (
        tempfile.TemporaryDirectory(prefix="ownerserve-demo-") as folder,
        DemoFleet(Path(folder), begin=forked) as fleet,
    ):
        run = DemoRun(policy, ("hybrid",) * workers, IMPATIENT)
        fleet.start(["worker", "--model", model, "--port", "0", *KEEPS], run)
        yield fleet
