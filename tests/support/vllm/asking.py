"""A question to an engine core, past its API server."""

from __future__ import annotations

from pathlib import Path

from ownerserve.engines.vllm.scheduler_side.node_rpc import ADDRESS_FILE
from ownerserve.kv.wire.rpc import RpcRequest, Said
from ownerserve.node.rpc.server import RpcClient


def ask(store: Path, request: RpcRequest) -> Said:
    """The answer of the core whose store this is. Raises OSError when none answers, TimeoutError
    when it is silent."""
    client = RpcClient((store / ADDRESS_FILE).read_text().strip())
    try:
        return client.ask(request)
    finally:
        client.close()
