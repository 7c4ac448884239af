"""This module makes OwnerServe's store a secondary tier of vLLM's own OffloadingConnector: the way
to adopt it without another connector.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "cpu_bytes_to_use": ..., "spec_name": "TieringOffloadingSpec", "secondary_tiers": [
            {"type": "OwnerServeTier", "module_path": "ownerserve.engines.vllm.offload_tier",
             "store": "DIR"}]}

What vLLM's `fs` tier leaves out is the store's: chunks are verified, limited, durable, and named
by the weights and not by a path. What the connector adds (sessions, restore plans, checkpoints
of hybrid models) this path does not have.

Owns the store and two kinds of threads. A chunk is one record; its name is vLLM's key under what
vLLM itself holds for the layout, and the weights. A chunk that fails verification is a miss.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ownerserve.engines.vllm.identity import weights_of
from ownerserve.kv.errors import InvalidInput
from ownerserve.node.storage.backing import Upkeep
from ownerserve.node.storage.limits import StoreLimits
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.model import (
    AlreadyStored,
    ArtifactKind,
    Meta,
    ReadHit,
    Want,
    WriteRefused,
)
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.backend import Reservation, TierBackend

DOMAIN = b"ownerserve/offload/1"
COMPONENT = "vllm-offload"
LIMITS = {
    "store_bytes": "disk_bytes",
    "store_bytes_per_day": "disk_bytes_per_day",
    "store_upkeep_s": "upkeep_s",
    "range_ttl_s": "range_ttl_s",
}
"""Settings of an entry of `secondary_tiers`, named as the connector's, and what each limits."""


def limits_of(given: Mapping[str, Any]) -> StoreLimits:
    """Return the store's limits; all chunks are ranges. Raises InvalidInput."""
    try:
        values = {LIMITS[name]: value for name, value in given.items()}
        return msgspec.convert({"point_share": 0.0, **values}, StoreLimits)
    except msgspec.ValidationError as error:
        raise InvalidInput(
            "secondary_tiers", str(error), "see docs/vllm.md for every key"
        ) from error


class OwnerServeTier(SecondaryTierManager):  # type: ignore[misc]
    """An `OwnerServeTier` moves chunks between vLLM's host memory and the store. vLLM makes one
    beside its scheduler, from one entry of `secondary_tiers`."""

    medium = Medium.STORAGE

    def __init__(
        self, *, store: str, weights: str = "", readers: int = 2, locality: str = "", **given: Any
    ) -> None:
        """Open the store and start the threads. `weights` is a digest or revision; empty: made
        from the checkpoint's files. `given` are the settings in LIMITS and vLLM's own arguments.
        Raises InvalidInput for a limit that is none."""
        limits = limits_of({name: given.pop(name) for name in LIMITS if name in given})
        super().__init__(**given)
        self._chunks = memoryview(self._primary_kv_view).cast("B")
        namespace = _namespace(given["offloading_spec"], Path(store), weights)
        self._tier: TierBackend = DiskTier(Path(store), WallClock(), options=limits.on_disk())
        self._upkeep = Upkeep([self._tier], limits.upkeep_s)
        self._upkeep.start()
        self._names = _Names(namespace)
        self._lookups = _Lookups(self._tier, self._names, self.tier_type)
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="ownerserve-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ownerserve-write")
        self._flying: set[Future[None]] = set()
        self._done: SimpleQueue[tuple[JobResult, list[bytes]]] = SimpleQueue()

    # -- asked by vLLM's scheduler: nothing here waits -----------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._writer, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._readers, self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished: list[JobResult] = []
        while True:
            try:
                result, failed = self._done.get_nowait()
            except Empty:
                return finished
            self._lookups.mark_miss(failed)
            finished.append(result)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        wait(self._flying)

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._readers.shutdown()
        self._writer.shutdown()
        if self._upkeep.stop():
            self._tier.close()

    # -- on our threads ------------------------------------------------------------------------

    def _submit(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[list[bytes], list[memoryview]], list[bytes]],
        job: TransferJob,
    ) -> None:
        self._flying = {future for future in self._flying if not future.done()}
        self._flying.add(threads.submit(self._run, work, job))

    def _run(
        self, work: Callable[[list[bytes], list[memoryview]], list[bytes]], job: TransferJob
    ) -> None:
        """Do a job and report it; `work` gives the keys that failed, the others are done."""
        began_s = time.perf_counter()
        keys, size = list(job.keys), self.block_size_bytes
        at = [int(chunk) * size for chunk in job.chunk_ids]
        failed = keys
        try:
            failed = work(keys, [self._chunks[start : start + size] for start in at])
        finally:  # whatever happened: vLLM holds the chunks until it hears of the job
            good = tuple(key for key in keys if key not in set(failed))
            result = JobResult(
                job_id=job.job_id,
                success=not failed,
                successful_keys=good if job.is_promotion and failed and good else None,
                transfer_time=time.perf_counter() - began_s,
                transfer_bytes=len(good) * size,
            )
            self._done.put((result, failed if job.is_promotion else []))

    def _load(self, keys: list[bytes], places: list[memoryview]) -> list[bytes]:
        """Read each chunk into its place and give the keys that failed. Only verified bytes get
        into a place; a chunk that has none is a miss, alone."""
        failed = []
        for key, place in zip(keys, places, strict=True):
            outcome = self._tier.read([Want(self._names.id_of(key))])
            if isinstance(outcome, ReadHit) and len(outcome.parts[0].data) == len(place):
                place[:] = outcome.parts[0].data
            else:
                failed.append(key)
        return failed

    def _store(self, keys: list[bytes], places: list[memoryview]) -> list[bytes]:
        """Store all chunks as one group, with one sync; give the keys that were not stored."""
        reserved: list[Reservation] = []
        failed = []
        for key, place in zip(keys, places, strict=True):
            room = self._tier.reserve(self._names.meta_of(key), len(place))
            if isinstance(room, Reservation):
                room.payload[:] = place
                reserved.append(room)
            elif not isinstance(room, AlreadyStored):
                failed.append(key)
        refused = {
            outcome.id
            for outcome in self._tier.commit(reserved)
            if isinstance(outcome, WriteRefused)
        }
        return failed + [key for key in keys if self._names.id_of(key) in refused]


class _Names:
    """`_Names` says which record a chunk is."""

    def __init__(self, namespace: bytes) -> None:
        self._namespace = namespace

    def id_of(self, key: bytes) -> bytes:
        return hashlib.sha256(DOMAIN + self._namespace + key).digest()

    def meta_of(self, key: bytes) -> Meta:
        id_ = self.id_of(key)
        return Meta(
            id=id_,
            kind=ArtifactKind.RANGE,
            component=COMPONENT,
            prefix_hash=hashlib.sha256(key).digest(),
            first_token=0,
            end_token=0,
        )


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """`_Lookups` is vLLM's batching of lookups, over the store's catalogue."""

    def __init__(self, tier: TierBackend, names: _Names, tier_type: str) -> None:
        self._tier = tier
        self._names = names
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        ids = [self._names.id_of(key) for key in keys]
        found = self._tier.find(ids)
        return [id_ in found for id_ in ids]


def _namespace(spec: Any, store: Path, weights: str) -> bytes:
    """Return a digest of vLLM's own description of the layout, and the weights."""
    fields = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=spec,
        blocks_per_file=spec.blocks_per_chunk,
        parallel_agnostic=True,
    ).get_run_config()
    name = str(fields.pop("model_name"))
    weights = weights or _weights_by_files(name, store)
    text = json.dumps([weights, fields], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def _weights_by_files(model: str, store: Path) -> str:
    if not Path(model).is_dir():
        raise InvalidInput(
            "secondary_tiers.weights",
            f"{model} is no folder whose files could name the weights",
            'set "weights" to the revision or a digest',
        )
    config = SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(model=model, revision=None),
    )
    return weights_of(config, cache=store / "weights.json")
