"""What vLLM would start anew is forked here, so that none of its processes imports it again.

On a CPU vLLM spawns its engine cores and workers, and each imports vLLM for itself: some ten
seconds of CPU, most of a start. So does the process that it asks what a model's class can do, whose
answers it keeps in one file a model, whichever version wrote it last. A process that has imported
vLLM lets them be forked, and looks at the class itself; all else is vLLM's.
"""

from __future__ import annotations

import gc
import multiprocessing


def fork_what_vllm_spawns() -> None:
    """From now on every context of `multiprocessing` forks, whatever is asked for. What is imported
    counts as not to be collected: a start asks seven times for a whole collection, which would
    look at each of these objects, and copy the page that it is in."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # noqa: SLF001
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    gc.collect()
    gc.freeze()
