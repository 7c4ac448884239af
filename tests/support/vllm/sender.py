"""A connector that only sends, as NIXL's on a prefill worker: a finished request's blocks stay
until a worker says that they were sent, and whoever asked hears where they are.

It stands in for NIXL, whose wheel is not in the test environment.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


class Finished(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, ids: set[str]) -> None:
        self.ids = ids


class Sender(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """What is finished in one step counts as sent two steps later."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._finished: set[str] = set()
        self._sending: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return True

    def start_load_kv(self, forward_context: Any, **_: Any) -> None: ...

    def has_connector_metadata(self) -> bool:
        return False

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, self._sending = self._sending, set()
        if isinstance(self._connector_metadata, Finished):
            self._sending |= self._connector_metadata.ids
        return KVConnectorTransferResults(finished_sending=sent)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        finished, self._finished = self._finished, set()
        return Finished(finished)

    def has_pending_push_work(self) -> bool:
        return bool(self._finished)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._finished.add(request.request_id)
        return True, {"sent_from": "here"}
