"""The registry finds the experiments of each suite, in the order of the report.

Every module below this folder that has an `EXPERIMENTS` list brings experiments, and each says of
which suite it is.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim import suites
from ownerserve.sim.suites.base import Experiment

SUITES = ("seeds", "together")


@cache
def experiments() -> tuple[Experiment, ...]:
    """Return all experiments, ordered by module name, then as the module lists them."""
    found: list[Experiment] = []
    modules = pkgutil.walk_packages(suites.__path__, f"{suites.__name__}.")
    for name in sorted(module.name for module in modules):
        found += getattr(importlib.import_module(name), "EXPERIMENTS", ())
    return tuple(found)


def chosen(suite: str, only: tuple[str, ...] = ()) -> tuple[Experiment, ...]:
    """Return the experiments of `suite`, or those named, of any suite. Raises InvalidInput for
    a name that is none."""
    if suite not in SUITES:
        raise InvalidInput("--suite", f"{suite!r} is unknown", f"use {', '.join(SUITES)}")
    by_name = {experiment.name: experiment for experiment in experiments()}
    for name in only:
        if name not in by_name:
            raise InvalidInput("--only", f"{name!r} is unknown", f"use {', '.join(by_name)}")
    if only:
        return tuple(by_name[name] for name in only)
    return tuple(experiment for experiment in experiments() if experiment.suite == suite)
