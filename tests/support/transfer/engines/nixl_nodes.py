"""Nodes bring from each other over NIXL; in an environment that has the engine."""

from __future__ import annotations

from tests.support.transfer.engines.node_suite import NodesOverEngine


class TestNixlNodes(NodesOverEngine):
    road = "nixl"
