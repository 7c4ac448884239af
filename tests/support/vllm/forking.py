"""What vLLM would start anew it forks here, so that none of its processes imports it again.

On a CPU vLLM spawns its engine cores and workers, and each imports vLLM for itself: some ten
seconds of CPU, most of a start. In a process that has imported it, this lets them be forked; all
else is vLLM's.
"""

from __future__ import annotations

import multiprocessing


def fork_what_vllm_spawns() -> None:
    """From now on every context of `multiprocessing` forks, whatever is asked for."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
