"""Lets LMCache and vLLM 0.32's CPU build live in one process; imported before the engine is built.

vLLM looks for a `kernel` attribute in everything that any loaded module holds. A wrapper in
llvmlite's ffi module (numba, which LMCache imports) answers `vars()` with no mapping, and vLLM
dies. The module is out of sight while vLLM looks; nothing of either is changed.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.triton_utils import dispatcher

HIDDEN = "llvmlite.binding.ffi"
_rebind = dispatcher._rebind_kernels


def _rebind_without_llvmlite(pairs: Any) -> Any:
    hidden = sys.modules.pop(HIDDEN, None)
    try:
        return _rebind(pairs)
    finally:
        if hidden is not None:
            sys.modules[HIDDEN] = hidden


dispatcher._rebind_kernels = _rebind_without_llvmlite
