"""Ports and keys of an engine core, as its settings name them."""

from __future__ import annotations

from pathlib import Path

from ownerserve.kv.addresses import is_loopback
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.wire.curve import FleetKey, read_fleet_key
from ownerserve.node.rpc.server import RpcServer

KEY_FIELD = "kv_connector_extra_config.curve_key_file"
HOST_FIELD = "kv_connector_extra_config.rpc_host"


def fleet_key(key_file: str) -> FleetKey | None:
    """The keys in `key_file`; empty: none. Raises InvalidInput."""
    return read_fleet_key(Path(key_file), field=KEY_FIELD) if key_file else None


def gateway_port(host: str, port: int, key_file: str) -> RpcServer | None:
    """Where gateways of other hosts ask; None without a `host`. Raises InvalidInput where nothing
    can listen there, or nobody may without keys."""
    if not host:
        return None
    key = fleet_key(key_file)
    if key is None and not is_loopback(host):
        problem = f"{host} is reachable from outside, and there are no keys"
        raise InvalidInput(HOST_FIELD, problem, "set curve_key_file too")
    return RpcServer(host=host, port=port, key=key)
