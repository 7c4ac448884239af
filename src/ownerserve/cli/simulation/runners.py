"""This module says where a command's runs go: this machine's cores, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.cluster import RayRunner
from ownerserve.sim.pool import TaskRunner, run_tasks

Command = TypeVar("Command", bound=Callable[..., Any])


def runner_options(command: Command) -> Command:
    """Add the options `--jobs` and `--ray`."""
    jobs = click.option(
        "--jobs", type=click.IntRange(0, 1024), default=0, help="Runs at once.  [one a core]"
    )
    ray = click.option(
        "--ray",
        metavar="ADDRESS",
        help="Runs on a Ray cluster instead: auto, ray://HOST:10001, or local (extra [ray]).",
    )
    return jobs(ray(command))


def runner_of(jobs: int, ray: str | None) -> TaskRunner:
    """Return the runner that the options name. Raises InvalidInput."""
    if ray is None:
        return partial(run_tasks, processes=jobs)
    if jobs:
        raise InvalidInput("--jobs", "is of no use with --ray", "a cluster runs one task a CPU")
    return RayRunner(ray)
