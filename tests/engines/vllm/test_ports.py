"""An engine core's RPC handler, asked from its own host and from others. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from ownerserve.engines.vllm.scheduler_side.holding import Holding
from ownerserve.engines.vllm.scheduler_side.node_rpc import (
    ADDRESS_FILE,
    EngineLimits,
    NodeRpcHandler,
)
from ownerserve.engines.vllm.scheduler_side.owning import (
    SessionsHere,
    gateway_port,
    transfer_place,
)
from ownerserve.engines.vllm.settings import decode
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.curve import read_fleet_key, write_fleet_key
from ownerserve.kv.wire.rpc import Status, StatusIs
from ownerserve.node.rpc.server import RpcClient
from tests.support.net import own_address

LIMITS = EngineLimits(
    unit=RoutingUnit(WorkerId("w"), 0, Incarnation(7)),
    model="m",
    sequence_tokens=1000,
    max_waiting=2,
    token_bytes=10,
)


class Nothing(Holding):
    """A store without a session."""

    def __init__(self) -> None:
        """No thread: nothing is asked of it here."""


def test_a_desk_is_asked_from_other_hosts_with_keys_and_here_without(tmp_path: Path) -> None:
    host, file = own_address(), tmp_path / "fleet.key"
    write_fleet_key(file, field="--out")
    key = read_fleet_key(file)
    handler = NodeRpcHandler(LIMITS, Nothing(), SessionsHere(None))
    handler.open(tmp_path, gateway_port(host, 0, str(file)))
    try:
        here = RpcClient((tmp_path / ADDRESS_FILE).read_text())
        told = here.ask(Status())
        assert isinstance(told, StatusIs) and told.profile is not None
        assert told.profile.rpc is not None and told.profile.rpc.startswith(f"curve://{host}:")
        elsewhere = RpcClient(told.profile.rpc, key=key)
        asked = elsewhere.ask(Status())
        assert isinstance(asked, StatusIs) and asked.status.unit == LIMITS.unit
        plain = RpcClient("tcp://" + told.profile.rpc.removeprefix("curve://"), timeout_s=0.3)
        with pytest.raises(TimeoutError):
            plain.ask(Status())
        for client in (here, elsewhere, plain):
            client.close()
    finally:
        handler.close()
    assert not (tmp_path / ADDRESS_FILE).exists()


def test_without_an_address_only_this_host_asks(tmp_path: Path) -> None:
    assert gateway_port("", 0, "") is None
    handler = NodeRpcHandler(LIMITS, Nothing(), SessionsHere(None))
    handler.open(tmp_path, None)
    here = RpcClient((tmp_path / ADDRESS_FILE).read_text())
    told = here.ask(Status())
    assert isinstance(told, StatusIs) and told.profile is not None
    assert told.profile.rpc == (tmp_path / ADDRESS_FILE).read_text()
    here.close()
    handler.close()


def test_what_can_not_listen_is_one_error_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"config\.rpc_host: 10\.0\.0\.5.*give curve_key_file"):
        gateway_port("10.0.0.5", 0, "")
    with pytest.raises(InvalidInput, match=r"config\.curve_key_file: .*No such file"):
        gateway_port("10.0.0.5", 0, str(tmp_path / "none"))
    with pytest.raises(InvalidInput, match="rpc_port: 65536"):
        decode({"store": str(tmp_path), "rpc_port": 65536})
    store = tmp_path / "a-file"
    store.write_text("")
    handler = NodeRpcHandler(LIMITS, Nothing(), SessionsHere(None))
    with pytest.raises(OSError, match="exists"):
        handler.open(store, None)
    handler.close()


def test_a_transfer_interface_is_a_device_of_this_machine() -> None:
    place = transfer_place("127.0.0.1", 0, "", lend_bytes=1, interface="lo")
    assert place.interface == "lo"
    with pytest.raises(InvalidInput, match=r"extra_config\.transfer_interface.*nosuch0"):
        transfer_place("127.0.0.1", 0, "", lend_bytes=1, interface="nosuch0")
