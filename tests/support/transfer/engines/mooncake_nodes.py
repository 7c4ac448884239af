"""Nodes bring from each other over Mooncake; in an environment that has the engine."""

from __future__ import annotations

from tests.support.transfer.engines.node_suite import NodesOverEngine


class TestMooncakeNodes(NodesOverEngine):
    road = "mooncake"
