"""An idle session's soft reference ends by time, whatever runs or does not run meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.cache.outcomes import DEFAULT_TTL_S  # noqa: E402
from ownerserve.cache.tree.prefix_tree import Session  # noqa: E402
from ownerserve.engines.hf.build import WorkerOptions  # noqa: E402
from ownerserve.engines.hf.scheduling.requests import Delta  # noqa: E402
from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.node.vocabulary.settings import NodeSettings  # noqa: E402
from tests.support.hf.engine_rig import Later, Rig, request, text  # noqa: E402

pytestmark = pytest.mark.engine


def rig_with(store: Path | None) -> Rig:
    if store is None:
        return Rig(max_running=4)
    node = NodeSettings(spill_after_s=1e6)
    return Rig(max_running=4, options=WorkerOptions(model="tiny-v4", store=store, node=node))


def idle(rig: Rig, name: str) -> Session:
    session = rig.cache.sessions.get(SessionId(name))
    assert session is not None and session.is_referenced and session.stop is not None
    return session


async def until_expired(session: Session) -> None:
    """Sleeps until the session's soft reference is gone; the engine works meanwhile, or rests."""
    until = time.monotonic() + 60.0
    while session.is_referenced:
        assert time.monotonic() < until, "the soft reference outlived its time"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("has_store", [False, True])
def test_soft_references_end_while_only_decode_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_store: bool
) -> None:
    clock, rig = Later(monkeypatch), rig_with(tmp_path if has_store else None)

    async def scenario() -> None:
        await rig.ask(request("one", text(200), session="s"))
        session = idle(rig, "s")
        stream = rig.engine.submit(request("long", text(100, seed=2), new=2000))
        while not isinstance(await stream.next(), Delta):
            pass
        clock.by_s = DEFAULT_TTL_S + 1.0
        await until_expired(session)
        assert rig.engine.latest.running_sequences == 1, "nothing has arrived or ended since"
        assert session.stop is not None and session.stop.refs == 0, "it goes first from now on"
        rig.engine.abort("long")

    rig.play(scenario)


@pytest.mark.parametrize("has_store", [False, True])
def test_soft_references_end_while_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_store: bool
) -> None:
    """The engine thread sleeps until the first one is due, and no longer."""
    clock, rig = Later(monkeypatch), rig_with(tmp_path if has_store else None)

    async def scenario() -> None:
        await rig.ask(request("one", text(200), session="s"))
        session = idle(rig, "s")
        clock.by_s = session.expires_s - time.monotonic() - 1.0
        await rig.engine.status(10.0)  # from here on the thread sleeps by the clock as it is now
        assert session.is_referenced, "it is not due yet"
        await until_expired(session)

    rig.play(scenario)
