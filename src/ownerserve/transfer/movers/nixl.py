"""The mover over NIXL, by UCX and without its progress thread. It can't be fenced. Arena only.

    lender   open_agent, register the pools, told_by(agent) ──> LentMemory.roads
             NixlProgress.resume while something is lent: over TCP its own calls move the bytes
    reader   open_agent, register the arena, nixl_mover(agent, address)

`OpenNixl` is both sides of one process.

What was measured of it (docs/evidence/transfer.md): it has no deadline and no abort. Of a frozen
peer a transfer is PROC for as long as it is frozen, also after its handle is released, and is
written once the peer runs again. So a read that ends amid a batch ends `ReadUnproven`, and
`ReadQuiet` follows when NIXL says DONE. It says ERR when one descriptor of a batch has failed,
whatever the others do: never quiet. Over TCP it has no authentication either, and listens on all
interfaces unless UCX_NET_DEVICES names some.

An agent that is told a cut copy of what it knows of a peer forgets the peer, and takes the whole
one no more. So an address has a digest, and only a whole one is told.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from ownerserve.kv.errors import InvalidInput
from ownerserve.transfer.movers.arena import StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.engines import FIELD, load_engine
from ownerserve.transfer.movers.unfenced import Batch, BatchState, UnfencedMover
from ownerserve.transfer.vocabulary import ReadFailure

log = logging.getLogger("ownerserve.transfer")

PROGRESS_S = 0.0005
_DIGEST_BYTES = 16
_STATES = {"PROC": BatchState.UNDER_WAY, "DONE": BatchState.LANDED}


class NixlAgent(Protocol):
    """What is needed of nixl's `nixl_agent`, which knows the arena already. It is called by several
    threads: made by `open_agent`, it locks itself. All of it raises NIXL's own errors, which have
    no base of theirs."""

    def get_agent_metadata(self) -> bytes:
        """Return how this agent and what is registered with it are reached."""
        ...

    def add_remote_agent(self, metadata: bytes, /) -> str | bytes:
        """Know a peer from now on; returns its name."""
        ...

    def get_xfer_descs(self, rows: NDArray[np.uint64], memory: str, /) -> Any:
        """Return descriptors of rows of address, bytes and device."""
        ...

    def initialize_xfer(
        self, operation: str, local: Any, remote: Any, peer: str | bytes, notice: bytes, /
    ) -> Any:
        """Return a handle, which is freed when nobody has it any more: this stops no writer.
        Nothing is sent yet."""
        ...

    def transfer(self, handle: Any, /) -> str:
        """Begin; returns DONE, PROC or ERR."""
        ...

    def check_xfer_state(self, handle: Any, /) -> str:
        """Move what has come to its place, and return DONE, PROC or ERR."""
        ...

    def get_new_notifs(self) -> object:
        """Answer what peers ask of this agent's memory."""
        ...


def open_agent(name: str) -> Any:
    """Return a nixl_agent of that name without a progress thread, which several threads may call.
    The name is for one life of a process: peers take one that comes again for the former.

    Raises InvalidInput where the package is missing, and NIXL's errors where UCX can't be opened.
    """
    nixl = load_engine("nixl")
    strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
    return nixl.nixl_agent(name, config)


def told_by(agent: NixlAgent) -> str:
    """Return the address of what is registered with the agent now, for its readers."""
    metadata = agent.get_agent_metadata()
    return base64.b64encode(xxh3_128_digest(metadata) + metadata).decode()


def _metadata(address: str) -> bytes | ReadFailure:
    """Return what `told_by` made the address of, if it is whole."""
    try:
        whole = base64.b64decode(address, validate=True)
    except (binascii.Error, ValueError):
        return ReadFailure.UNABLE
    digest, metadata = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    return metadata if digest == xxh3_128_digest(metadata) else ReadFailure.UNABLE


class _Transfer:
    """A transfer of NIXL's. One that has not landed keeps its handle."""

    def __init__(self, agent: NixlAgent, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._state = BatchState.UNDER_WAY

    def post(self) -> None:
        self._ask(self._agent.transfer)

    def look(self) -> BatchState:
        if self._state is BatchState.UNDER_WAY:
            self._ask(self._agent.check_xfer_state)
        return self._state

    def _ask(self, call: Callable[[Any], str]) -> None:
        try:
            self._state = _STATES.get(call(self._handle), BatchState.FAILED)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no base: a peer that ended
            log.warning("NIXL: a batch failed: %s", error)
            self._state = BatchState.FAILED
        if self._state is BatchState.LANDED:
            self._handle = None


class _PeerAgent:
    """The agent, and the name by which it knows one peer."""

    def __init__(self, agent: NixlAgent, peer: str | bytes) -> None:
        self._agent, self._peer = agent, peer

    def begin(self, batch: Batch, /) -> _Transfer | ReadFailure:
        agent = self._agent
        try:
            goals = agent.get_xfer_descs(_rows(batch.goals), "DRAM")
            sources = agent.get_xfer_descs(_rows(batch.sources), "DRAM")
            handle = agent.initialize_xfer("READ", goals, sources, self._peer, b"")
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no base: nothing is begun
            log.warning("NIXL: a batch is not begun: %s", error)
            return _refusal(error)
        begun = _Transfer(agent, handle)
        begun.post()
        return begun


def _rows(vectors: NDArray[np.int64]) -> NDArray[np.uint64]:
    rows = np.zeros((len(vectors), 3), np.uint64)
    rows[:, :2] = vectors
    return rows


def _refusal(error: Exception) -> ReadFailure:
    """Return why a transfer was not begun."""
    said = str(error)
    if "REMOTE_DISCONNECT" in said:
        return ReadFailure.PEER_LOST
    if "NOT_FOUND" in said:  # the peer has not registered it
        return ReadFailure.REFUSED
    return ReadFailure.UNABLE


def nixl_mover(
    agent: NixlAgent, address: str, *, arena: StagingMemory, digests: Digests
) -> UnfencedMover:
    """Return a mover that reads from who said the address (`told_by`), into the arena. Reads by one
    that is not whole, or of another back end, end UNABLE. The agent knows the peer from then on,
    also when the mover is closed."""
    return UnfencedMover("nixl", _known(agent, address), arena=arena, digests=digests)


def _known(agent: NixlAgent, address: str) -> _PeerAgent | ReadFailure:
    metadata = _metadata(address)
    if isinstance(metadata, ReadFailure):
        return metadata
    try:
        return _PeerAgent(agent, agent.add_remote_agent(metadata))
    except Exception as error:  # noqa: BLE001 - NIXL's errors have no base
        log.warning("NIXL: a peer can't be known: %s", error)
        return ReadFailure.UNABLE


class NixlProgress:
    """A `NixlProgress` moves an agent's side of others' reads on, between `resume` and `pause`:
    over TCP nothing else does without NIXL's own thread, which polls a whole core for ever. Paused,
    its thread sleeps. Owns the thread, not the agent."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._lends = Event()
        self._closed = Event()
        self._thread = Thread(target=self._run, name="progress-nixl", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Answer readers from now on: something is lent."""
        self._lends.set()

    def pause(self) -> None:
        """Answer none any more: nothing is lent."""
        self._lends.clear()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._lends.set()
        self._thread.join()

    def _run(self) -> None:
        while self._lends.wait() and not self._closed.wait(PROGRESS_S):
            try:
                self._agent.get_new_notifs()
            except Exception:  # another's library: readers see that nothing comes
                log.exception("NIXL can't answer its readers")
                self._lends.clear()


class OpenNixl:
    """An `OpenNixl` is NIXL's agent, open in this process under a name of this life of it
    (OpenEngine, port.py). Owns the thread that moves others' reads on."""

    def __init__(self, name: str) -> None:
        """Open the agent. Raises InvalidInput where that can't be."""
        try:
            self._agent = open_agent(name)
        except InvalidInput:
            raise
        except Exception as error:  # NIXL's errors have no base
            mend = "see what UCX says (UCX_LOG_LEVEL=info), or leave nixl out"
            raise InvalidInput(FIELD, f"NIXL's agent can't be opened: {error}", mend) from error
        self._progress = NixlProgress(self._agent)

    @property
    def address(self) -> str:
        """Return how readers reach what is registered now."""
        return told_by(self._agent)

    def register(self, address: int, size: int) -> None:
        """Let these bytes of this process be read from, and into. Raises InvalidInput where the
        agent takes them not."""
        try:
            self._agent.register_memory([(address, size, 0, "")], "DRAM")
        except Exception as error:  # NIXL's errors have no base
            mend = "raise the limit of locked memory, or leave nixl out"
            raise InvalidInput(FIELD, f"NIXL takes {size} bytes not: {error}", mend) from error

    def mover(self, address: str, *, arena: StagingMemory, digests: Digests) -> UnfencedMover:
        """Return a mover that reads from who said that address."""
        return nixl_mover(self._agent, address, arena=arena, digests=digests)

    def lends(self) -> None:
        """Answer readers from now on."""
        self._progress.resume()

    def rests(self) -> None:
        """Answer none any more: nothing is lent."""
        self._progress.pause()

    def close(self) -> None:
        """Answer nobody any more."""
        self._progress.close()
