"""vLLM's own OffloadingConnector with its tiers, on a CPU: the baseline ours is measured against.

As shipped the connector refuses CPUs, because its worker copies by CUDA stream. This out-of-tree
spec (`spec_module_path`) changes that worker alone: one thread that copies pages by memmove. The
primary tier, the `fs` tier, lookup, eviction and everything in the scheduler stay vLLM's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's TieringOffloadingSpec for an engine whose KV is in host memory already."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemmoveWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class MemmoveWorker(OffloadingWorker):
    """Copies pages between the engine's KV tensors and the primary tier, in submission order."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._region = region
        self._pages = [entry.page_size_bytes for entry in kv_caches.tensors]
        self._engine: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        for entry in kv_caches.tensors:
            flat = entry.tensor.view(torch.int8).view(-1, entry.page_size_bytes)
            self._engine.append(flat)
            chunk_bytes = entry.page_size_bytes * blocks_per_chunk
            self._host.append(region.create_next_worker_view(chunk_bytes))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-copy")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        moves = [(host, engine, size) for engine, host, size in self._pairs(src_spec, dst_spec)]
        return self._submit(job_id, moves)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, list(self._pairs(dst_spec, src_spec)))

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job_id] for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._region.cleanup()

    def _pairs(self, engine_spec: Any, host_spec: Any) -> Iterator[tuple[int, int, int]]:
        """(engine address, host address, bytes) of each page of a transfer.

        Blocks come group after group; a group's first chunk may be entered in its middle.
        """
        block_at = chunk_at = 0
        for group, count in enumerate(engine_spec.group_sizes):
            if not count:
                continue
            skip = engine_spec.block_indices[group] % self._blocks_per_chunk
            blocks = engine_spec.block_ids[block_at : block_at + count]
            chunks = -(-(count + skip) // self._blocks_per_chunk)
            ids = host_spec.block_ids[chunk_at : chunk_at + chunks]
            for ref in self._groups[group]:
                yield from self._ref_pairs(ref, blocks, chunks=ids, skip=skip)
            block_at, chunk_at = block_at + count, chunk_at + chunks

    def _ref_pairs(
        self, ref: Any, blocks: Sequence[int], *, chunks: Sequence[int], skip: int
    ) -> Iterator[tuple[int, int, int]]:
        engine, host = self._engine[ref.tensor_idx], self._host[ref.tensor_idx]
        page = self._pages[ref.tensor_idx]
        for position, block in enumerate(blocks, start=skip):
            chunk, inside = divmod(position, self._blocks_per_chunk)
            yield (
                engine.data_ptr() + int(block) * engine.stride(0),
                host.data_ptr() + int(chunks[chunk]) * host.stride(0) + inside * page,
                ref.page_size_bytes,
            )

    def _submit(self, job_id: int, moves: list[tuple[int, int, int]]) -> bool:
        """Moves are (to, from, bytes)."""
        self._jobs[job_id] = self._thread.submit(_copy, job_id, moves)
        return True


def _copy(job_id: int, moves: list[tuple[int, int, int]]) -> TransferResult:
    start = time.perf_counter()
    for target, source, size in moves:
        ctypes.memmove(target, source, size)
    moved = sum(size for _, _, size in moves)
    took_s = time.perf_counter() - start
    return TransferResult(job_id, success=True, transfer_size=moved, transfer_time=took_s)
