"""Lets vLLM's CPU build run a pipeline without compiling, which takes a minute a start.

Plain vLLM 0.32 with `--pipeline-parallel-size 2` answers on a CPU once it has compiled; with
`--enforce-eager` its second stage dies at the first step (`assert self.intermediate_tensors is not
None`): the buffer for what the first stage sends is made by the warm-up, which an eager CPU skips.
`--worker-extension-cls` takes the class below into each worker, where this module makes the buffer
when it is first asked for, and does nothing else.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_gather = GPUModelRunner.sync_and_gather_intermediate_tensors


def gather(runner: Any, *args: Any, **options: Any) -> Any:
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )
    return _gather(runner, *args, **options)


GPUModelRunner.sync_and_gather_intermediate_tensors = gather


class EagerStages:
    """What a worker is extended by: this module's import."""
