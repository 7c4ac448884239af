"""This module is imported by the process that the demo's others are forks of: it imports what a
worker, a gateway and a directory would, once.

It must start no thread: a fork would lack it.
"""

from __future__ import annotations

import os
from importlib import import_module

# Before torch is imported, which reads the first one once; nothing is ever downloaded.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

MODULES = (
    "ownerserve.cli.directory.command",
    "ownerserve.cli.gateway",
    "ownerserve.cli.worker",
    "ownerserve.engines.hf.build",
    "ownerserve.engines.hf.http.serve",
    "ownerserve.engines.hf.http.server",
    "ownerserve.gateway.service",
)
CLASSES = ("AutoModelForCausalLM", "PreTrainedTokenizerFast")
"""transformers imports most of what a model of any family needs when it is asked for these."""

for module in MODULES:
    import_module(module)
for name in CLASSES:
    getattr(import_module("transformers"), name)
