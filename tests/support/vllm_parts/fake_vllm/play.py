"""A `Play` is one engine core at work: requests come, go and are given up, steps are scheduled and
answered, and workers do what they were told when the test says so. Whatever happens is checked."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any
from unittest import mock

from ownerserve.engines.vllm.turns import prompts
from tests.support.vllm_parts.fake_vllm.cache import FakeCacheManager, FakePool
from tests.support.vllm_parts.fake_vllm.request import BLOCK, FakeRequest
from tests.support.vllm_parts.fake_vllm.scheduler import FakeScheduler
from tests.support.vllm_parts.fake_vllm.side import Engine, Setup
from tests.support.vllm_parts.fake_vllm.workers import Workers

SPARE_BLOCKS = 6
MOST_TOKENS = 64
"""Tokens of a request at most."""
ROUNDS = 2000
"""Steps after which whatever is here has come to its end."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Play:
    """One engine core at work. `drafts` and `ahead` are vLLM's speculation and asynchronous
    scheduling."""

    def __init__(self, setup: Setup, *, drafts: int, ahead: bool) -> None:
        self.clock = Clock()
        self._patches = [
            mock.patch.object(time, "monotonic", self.clock),
            mock.patch.object(prompts, "AT_ONCE_TOKENS", setup.hashed_at_once),
        ]
        for patch in self._patches:
            patch.start()
        self.seen: Counter[str] = Counter()
        """What happened here, so that a test can tell that it was about something."""
        self.engine = engine = Engine(setup)
        windows = engine.shape.group_windows
        blocks = len(windows) * (MOST_TOKENS // BLOCK + 1) + SPARE_BLOCKS
        self.pool = FakePool(1 + blocks)
        manager = FakeCacheManager(self.pool, windows)
        engine.side.bind(self.pool, manager)
        self.scheduler = FakeScheduler(manager, engine.side, drafts=drafts, ahead=ahead)
        self.workers = Workers(engine.ranks)
        self.requests: list[FakeRequest] = []
        self.left: dict[str | None, list[int]] = {}
        """By tenant, what its last request left."""

    # -- requests ------------------------------------------------------------------------------

    def arrive(self, prompt: list[int], *, max_tokens: int, **names: Any) -> FakeRequest:
        """A request comes; `names` are its session and its cache_salt."""
        prompt = prompt[: MOST_TOKENS - max_tokens]
        request = FakeRequest(f"r{len(self.requests)}", prompt, max_tokens, **names)
        self.requests.append(request)
        self.engine.oracle.learn(request)
        self.scheduler.add_request(request)
        return request

    @property
    def here(self) -> list[FakeRequest]:
        return [request for request in self.requests if not request.is_finished()]

    def abort(self, request: FakeRequest) -> None:
        self.seen[f"aborted_{request.status.name}"] += 1
        self.scheduler.abort(request)
        self.check()

    def reset_cache(self, *, new_weights: bool) -> None:
        """vLLM's reset of running requests and of the connector, new weights with it or not."""
        if not self._resets():
            return
        if new_weights:
            self.engine.oracle.new_weights()
            self.workers.epoch += 1
        self.seen["new weights" if new_weights else "reset"] += 1
        self.engine.reset()
        self.check()

    def change_weights(self) -> None:
        """A call to vLLM's workers that may change the weights: the connector alone is reset. The
        workers compute on as before, which is not what the new weights' names say."""
        self.engine.oracle.new_weights()
        self.engine.reset()
        self.check()

    def _resets(self) -> bool:
        """Reset vLLM's own cache, where it can be asked to; where it raises, since blocks are still
        held, all that ran is preempted nevertheless, amid its steps it may be."""
        if self.scheduler.in_flight and self.scheduler.depth == 1:
            return False
        if self.scheduler.in_flight and self.scheduler.running:
            self.seen["reset amid steps"] += 1
        return self.scheduler.reset_prefix_cache()

    def forget_cache(self) -> None:
        """vLLM's reset of running requests without that of the connector, which hears of none."""
        if self._resets():
            self.seen["forgotten"] += 1
        self.check()

    # -- steps ---------------------------------------------------------------------------------

    def schedule(self) -> None:
        if len(self.scheduler.in_flight) == self.scheduler.depth:
            return
        before = sum(request.num_preemptions for request in self.requests)
        step = self.scheduler.schedule()
        self.engine.oracle.ordered(step.commands.saves)
        after = sum(request.num_preemptions for request in self.requests)
        self.seen["preempted"] += after - before
        self.seen["loads"] += len(step.commands.loads)
        self.seen["dropped"] += len(step.commands.drops)
        self.seen["drafted"] += sum(row.drafted for row in step.rows)
        self.check()

    def answer(self, accepted: int) -> None:
        """The oldest step in flight is run, and answered for."""
        if not self.scheduler.in_flight:
            return
        step = self.scheduler.in_flight[0]
        output = self.workers.execute(step, self.clock.now, accepted=accepted)
        self.scheduler.update_from_output(output)
        for row in step.rows:
            self.engine.oracle.learn(row.request)
        self.seen["failed loads"] += len(output.failed_recving)
        self.seen["good loads"] += len(output.finished_recving - output.failed_recving)
        self.check()

    # -- what is done beside them --------------------------------------------------------------

    def look_up(self) -> None:
        if self.engine.lookup.asked:
            self.engine.lookup.answer()

    def copy(self, rank: int, at: int) -> None:
        if saves := self.engine.ranks[rank % len(self.engine.ranks)].uncopied:
            self.engine.ranks[rank % len(self.engine.ranks)].copy(at % len(saves))

    def settle(self, rank: int, at: int, *, keeps: bool) -> None:
        worker = self.engine.ranks[rank % len(self.engine.ranks)]
        if worker.unsaved:
            worker.settle(at % len(worker.unsaved), keeps=keeps)

    def bring(self, rank: int, at: int, reason: str) -> None:
        worker = self.engine.ranks[rank % len(self.engine.ranks)]
        if worker.loading:
            operation_id = sorted(worker.loading)[at % len(worker.loading)]
            worker.bring(operation_id, self.clock.now, reason=reason)

    def forget_stored(self, at: int) -> None:
        """A rank's store evicts a record."""
        store = self.engine.ranks[at % len(self.engine.ranks)].store
        if store:
            del store[sorted(store)[at % len(store)]]

    # -- all of it -----------------------------------------------------------------------------

    def run(self, rounds: int) -> None:
        """So many steps, between which everything is done that can be."""
        for _ in range(rounds):
            while self.engine.lookup.asked:
                self.engine.lookup.answer()
            for rank in range(len(self.engine.ranks)):
                worker = self.engine.ranks[rank]
                while worker.uncopied:
                    self.copy(rank, 0)
                while worker.unsaved:
                    self.settle(rank, 0, keeps=True)
                while worker.loading:
                    self.bring(rank, 0, "")
            self.schedule()
            self.answer(accepted=1)

    def finish(self) -> None:
        """All requests come to their end, and all that they leave is saved."""
        for _ in range(ROUNDS):
            if not (self.here or self.engine.oracle.open or self.scheduler.in_flight):
                return
            self.run(1)
        raise AssertionError("a request waits for ever")

    def end(self) -> None:
        """Whatever is here comes to its end, and all is given back."""
        try:
            self._end()
        finally:
            self.engine.close()
            for patch in self._patches:
                patch.stop()

    def _end(self) -> None:
        while self.scheduler.in_flight:
            self.answer(accepted=0)
        for _ in range(ROUNDS):
            status = self.engine.side.status()
            ours = (status["holds"], status["loads"], status["late_turns"])
            is_open = any(ours) or self.engine.oracle.open
            if not self.here and not is_open and not self.scheduler.in_flight:
                break
            self.run(1)
        assert not self.here, "a request waits for ever"
        status = self.engine.side.status()
        under_way = {name: status[name] for name in ("turns", "holds", "loads", "late_turns")}
        assert not any(under_way.values()), under_way
        assert not self.engine.side.state.restores.unquiet, "a load that ended is waited for"
        assert not self.engine.oracle.open
        for _ in range(ROUNDS):  # given up while loading: freed when the load is over
            if not self.scheduler.requests:
                break
            self.run(1)
        assert not self.scheduler.requests, "what was given up while it loaded is never freed"
        assert self.pool.reset(), "blocks are still held"

    def check(self) -> None:
        """Every block that is being copied is held, and nothing counts that not all ranks said."""
        blocks = self.pool.blocks
        for rank in self.engine.ranks:
            for save in rank.uncopied:
                for block_id in (id_ for ids in save.place.blocks for id_ in ids):
                    assert blocks[block_id].ref_cnt > 0, f"{save} is copied from a free block"
        status = self.engine.side.status()
        assert status.get("restore_loaded", 0) <= self.seen["good loads"], "one rank had failed"
