"""This module tells what the demo's processes said to each other, by type: from their own
counts."""

from __future__ import annotations

import re

import httpx
import msgspec

from ownerserve.cli.demo.processes import DemoFleet
from ownerserve.directory.rpc.client import DirectoryClient

FRAMES = re.compile(r"^ownerserve_directory_frames_total (\S+)$", re.MULTILINE)
NODE = re.compile(
    r'^ownerserve_gateway_node_requests_total\{request="(\w+)"\} (\S+)$', re.MULTILINE
)


class Spoken(msgspec.Struct, frozen=True):
    """This struct counts the messages between the demo's processes.

    `directory`: messages that the directory was asked, by type; `frames`: in how many frames of
    workers; `node`: requests on the workers' RPC ports by the gateway, by type.
    """

    directory: dict[str, int]
    frames: int
    node: dict[str, int]


def spoken(fleet: DemoFleet) -> Spoken:
    """Return all that was said until now. Raises PeerLost when the directory does not answer."""
    client = DirectoryClient(fleet.directory_url)
    try:
        asked = client.status().asked
    finally:
        client.close()
    frames = sum(int(float(n)) for url in fleet.worker_urls for n in FRAMES.findall(metrics(url)))
    node = {name: int(float(n)) for name, n in NODE.findall(metrics(fleet.admin_url))}
    return Spoken(dict(sorted(asked.items())), frames, node)


def metrics(url: str) -> str:
    """Return what a process tells Prometheus, as text."""
    return httpx.get(f"{url}/metrics", timeout=30, trust_env=False).raise_for_status().text
