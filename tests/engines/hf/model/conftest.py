"""A laboratory: one model, its pools, and the truth from transformers' own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the hf engine needs the [engine] extra")
pytest.importorskip("transformers", reason="the hf engine needs the [engine] extra")

from transformers import DynamicCache  # noqa: E402

from ownerserve.cache.effects import (  # noqa: E402
    CopyBlock,
    CopyState,
    LoadPoint,
    ResetState,
    SavePoint,
)
from ownerserve.cache.layout import Table  # noqa: E402
from ownerserve.engines.hf.model.checkpoint import load_checkpoint  # noqa: E402
from ownerserve.engines.hf.model.runner import ALL_LOGITS, DecodeRow, ModelRunner  # noqa: E402
from ownerserve.engines.hf.model.tiny import TINY_MODELS, random_model  # noqa: E402
from ownerserve.kv.descriptor import TailForm  # noqa: E402

ONLINE_V4 = "tiny-v4 online"
TOLERANCE = 1e-4
STATE_SLOTS = 10


class Lab:
    """Sequences of one model over pools whose slots are handed out in a scattered order."""

    def __init__(
        self, model: Any, *, slots: int = 200, hca_tail: TailForm = TailForm.RAW_ROWS
    ) -> None:
        self.model = model
        self.runner = ModelRunner(model, hca_tail=hca_tail)
        self.layout = self.runner.layout
        self.block = self.layout.block_tokens
        self._slots = slots
        self._truth: dict[tuple[int, ...], Any] = {}
        self.runner.allocate(dict.fromkeys(self._names(), slots), STATE_SLOTS)
        self.release()

    def release(self) -> None:
        """All slots are free again; their bytes stay, as in a worker that has run for a while."""
        order = torch.randperm(self._slots, generator=torch.Generator().manual_seed(7))
        self._free = {name: order.tolist() for name in self._names()}
        self._states = list(range(STATE_SLOTS))

    def sequence(self, upto: int) -> Table:
        """A fresh sequence with room for `upto` tokens."""
        table = Table(range={name: [] for name in self.layout.range_names}, state=self.state())
        self.reserve(table, upto)
        self.runner.apply([ResetState(table.state)])
        return table

    def state(self) -> int:
        return self._states.pop()

    def reserve(self, table: Table, upto: int) -> None:
        for name, slots in table.range.items():
            slots += self.slots(name, -(-upto // self.block) - len(slots))

    def slots(self, name: str, count: int) -> list[int]:
        return [self._free[name].pop() for _ in range(count)]

    def compute(
        self, table: Table, tokens: Sequence[int], start: int, *, chunk: int, write_floor: int = 0
    ) -> Any:
        """Logits of `tokens[start:]`, computed in chunks of at most `chunk`."""
        logits = [
            self.runner.prefill(
                table,
                tokens[at : at + chunk],
                at,
                write_floor=write_floor,
                logits_to_keep=ALL_LOGITS,
            )
            for at in range(start, len(tokens), chunk)
        ]
        return torch.cat(logits)

    def decode(self, tables: Sequence[Table], prompts: Sequence[Sequence[int]], at: int) -> Any:
        """One step of a batch: row i computes its token number `at[i]`."""
        rows = zip(tables, prompts, at, strict=True)
        return self.runner.decode([DecodeRow(t, tokens[p], p) for t, tokens, p in rows])

    def save(self, table: Table) -> dict[str, int]:
        """Snapshot the state block into fresh point slots."""
        point = {name: self.slots(name, 1)[0] for name in self.layout.point_names}
        self.runner.apply([SavePoint(table.state, point)])
        return point

    def resume(self, table: Table, point: dict[str, int], *, at: int, upto: int) -> Table:
        """A sequence that shares sealed blocks [0, at) and starts from a snapshot."""
        shared = {name: slots[: at // self.block] for name, slots in table.range.items()}
        resumed = Table(range=shared, state=self.state())
        self.runner.apply([ResetState(resumed.state), LoadPoint(point, resumed.state)])
        self.reserve(resumed, upto)
        return resumed

    def fork(self, table: Table, *, at: int, upto: int) -> Table:
        """A branch in mid-block: sealed blocks shared, the unfinished one and the state copied."""
        child = Table(
            {name: s[: at // self.block] for name, s in table.range.items()}, self.state()
        )
        block = {}
        for name, slots in child.range.items():
            slots += self.slots(name, 1)
            block[name] = (table.range[name][len(slots) - 1], slots[-1])
        self.runner.apply([CopyBlock(block), CopyState(table.state, child.state)])
        self.reserve(child, upto)
        return child

    def truth(self, tokens: Sequence[int]) -> Any:
        """Logits of all tokens by transformers alone, in one forward over its own cache."""
        key = tuple(tokens)
        if key not in self._truth:
            with torch.inference_mode():
                self._truth[key] = self.model(
                    input_ids=torch.tensor([key]),
                    past_key_values=DynamicCache(config=self.model.config),
                    use_cache=True,
                ).logits[0]
        return self._truth[key]

    def negate(self, component: str, slot: int) -> None:
        """Corrupt a slot: every number in it changes sign."""
        data = torch.frombuffer(
            bytearray(self.runner.read_slot(component, slot)), dtype=torch.float
        )
        self.runner.write_slot(component, slot, (-data).numpy().tobytes())

    def _names(self) -> list[str]:
        return [component.name for component in self.layout.components]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _labs() -> dict[str, Lab]:
    return {}


@pytest.fixture(params=[*sorted(TINY_MODELS), ONLINE_V4])
def lab(request: pytest.FixtureRequest, _labs: dict[str, Lab]) -> Iterator[Lab]:
    """Each family in turn, and V4 with an online HCA tail; all slots free."""
    name = request.param
    if name not in _labs:
        tail = TailForm.ONLINE if name == ONLINE_V4 else TailForm.RAW_ROWS
        _labs[name] = Lab(load_checkpoint(name.split()[0]).model, hca_tail=tail)
    _labs[name].release()
    return _labs[name]


@pytest.fixture(scope="session")
def make_lab() -> Callable[..., Lab]:
    """A laboratory for a configuration of the test's own."""

    def make(
        config: Any,
        hca_tail: TailForm = TailForm.RAW_ROWS,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Lab:
        return Lab(random_model(config, dtype=dtype), hca_tail=hca_tail)

    return make


@pytest.fixture(scope="session")
def text() -> Callable[[int], list[int]]:
    """`text(n)`: n fixed random bytes; a longer one begins with the shorter."""
    stream = torch.randint(0, 256, (1024,), generator=torch.Generator().manual_seed(3)).tolist()
    return lambda tokens: stream[:tokens]


@pytest.fixture(scope="session")
def largest_error() -> Callable[[Any, Any], float]:
    return lambda ours, truth: (ours - truth).abs().max().item()
