"""Settings are what an operator may give in `kv_connector_extra_config`, decoded and checked
once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from ownerserve.kv.addresses import LAST_PORT
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import LOOPBACK
from ownerserve.kv.units import GIB, MIB
from ownerserve.node.storage.limits import STANDARD, StoreLimits

POLICIES = ("branches", "turn-end", "full", "zero")
RESTORES = ("by-cost", "always")
DRAFTERS = ("left-out", "kept")


class SoftReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `SoftReference` says how idle sessions stay in vLLM's own pool.

    ttl_s           how long after a turn's end; 0: not at all
    pool_fraction   most of the pool that idle sessions may keep from being evicted
    """

    ttl_s: float = 300.0
    pool_fraction: float = 0.5

    def __post_init__(self) -> None:
        if self.ttl_s < 0:
            raise InvalidInput("soft_reference.ttl_s", f"{self.ttl_s}", "use 0 or more seconds")
        if not 0 <= self.pool_fraction <= 1:
            raise InvalidInput(
                "soft_reference.pool_fraction", f"{self.pool_fraction}", "use 0 to 1"
            )


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ConnectorSettings` are the keys of `kv_connector_extra_config`.

    store               directory of the artifact store; one vLLM instance writes it
    adopt               stores of engines that do not come back, of as many ranks: taken over into
                        `store` before serving, once; one that can't be is a warning
    store_bytes         most bytes of each rank's store on disk
    store_bytes_per_day most bytes written to it in a day, compaction included; 0: no limit
    store_upkeep_s      seconds between two passes that expire and compact it; 0: never
    range_ttl_s         how long KV stays that nobody reads; 0: for ever
    point_ttl_s         the same of window and recurrent state
    host_cache_bytes    host memory that holds copies of what was stored last; 0: none
    restore_deadline_s  after that a turn computes instead of waiting for the store
    restores            `by-cost`: load or compute, whichever is priced lower by what was measured;
                        `always`: load whatever is stored
    record_blocks       most blocks of B tokens in a range record; 0: as many as span 1,024 tokens
    block_tokens        B; 0: the least multiple of vLLM's blocks from 32 on
    checkpoints         which boundaries of a prompt get window and recurrent state
    drafter             whether a drafter's KV is `kept` with the target's, under names of both, or
                        `left-out`: its drafts are worse behind restored tokens
    copy_bytes          most bytes of KV that are held in the pool until they are copied
    save_buffer_bytes   most host memory of each rank for bytes that are copied and not durable yet;
                        0: four times copy_bytes
    staging_bytes       memory of a GPU through which KV is copied, half for each direction; a CPU
                        needs none
    readers             threads that read, verify and write back
    worker_id           what the worker calls itself, unlike any other of its fleet; empty: vLLM's
                        engine_id
    directory           address of the ownership directory that this engine owns its sessions under:
                        tcp:// or curve://HOST:PORT, valkey:// or sentinel://; empty: it owns none
    curve_key_file      the fleet's keys, which a curve:// directory and rpc_host want; empty: none
    rpc_host            address at which gateways on other hosts ask this engine; empty: none does
    rpc_port            its port; 0: a free one
    lend_bytes          host memory in which lies what other workers read of this one's store, as
                        much as is read at once; 0: nothing is lent
    transfer_host       address at which they read it; off loopback it needs curve_key_file
    transfer_port       its port; 0: a free one
    transfer_interface  network device by which alone KV goes over TCP; empty: any
    weights             digest or revision of the weights; empty: made from the checkpoint's files
    """

    store: str
    adopt: tuple[str, ...] = ()
    store_bytes: int = STANDARD.disk_bytes
    store_bytes_per_day: int = STANDARD.disk_bytes_per_day
    store_upkeep_s: float = STANDARD.upkeep_s
    range_ttl_s: float = STANDARD.range_ttl_s
    point_ttl_s: float = STANDARD.point_ttl_s
    host_cache_bytes: int = 0
    restore_deadline_s: float = 5.0
    restores: str = "by-cost"
    record_blocks: int = 0
    block_tokens: int = 0
    checkpoints: str = "branches"
    drafter: str = "left-out"
    copy_bytes: int = 256 * MIB
    save_buffer_bytes: int = 0
    staging_bytes: int = 64 * MIB
    readers: int = 2
    worker_id: str = ""
    directory: str = ""
    curve_key_file: str = ""
    rpc_host: str = ""
    rpc_port: int = 0
    lend_bytes: int = GIB
    transfer_host: str = LOOPBACK
    transfer_port: int = 0
    transfer_interface: str = ""
    weights: str = ""
    soft_reference: SoftReference = SoftReference()

    def __post_init__(self) -> None:
        if not self.store:
            raise InvalidInput("store", "is empty", "name a directory")
        for field in ("rpc_port", "transfer_port"):
            if not 0 <= getattr(self, field) <= LAST_PORT:
                raise InvalidInput(field, f"{getattr(self, field)}", f"use 0 to {LAST_PORT}")
        for field in ("store_bytes", "copy_bytes", "staging_bytes", "readers"):
            if getattr(self, field) < 1:
                raise InvalidInput(field, f"{getattr(self, field)}", "use 1 or more")
        sizes = ("host_cache_bytes", "save_buffer_bytes", "block_tokens", "record_blocks")
        aging = ("store_bytes_per_day", "store_upkeep_s", "range_ttl_s", "point_ttl_s")
        for field in (*sizes, *aging, "restore_deadline_s", "lend_bytes"):
            if not getattr(self, field) >= 0:
                raise InvalidInput(field, f"{getattr(self, field)}", "use 0 or more")
        choices = (("checkpoints", POLICIES), ("restores", RESTORES), ("drafter", DRAFTERS))
        for field, known in choices:
            if getattr(self, field) not in known:
                raise InvalidInput(
                    field, f"{getattr(self, field)!r}", f"use one of {', '.join(known)}"
                )

    def store_limits(self, point_share: float) -> StoreLimits:
        """Return the limits of each rank's store, `point_share` of it for points."""
        return StoreLimits(
            disk_bytes=self.store_bytes,
            point_share=point_share,
            range_ttl_s=self.range_ttl_s,
            point_ttl_s=self.point_ttl_s,
            disk_bytes_per_day=self.store_bytes_per_day,
            upkeep_s=self.store_upkeep_s,
        )

    @property
    def buffer_bytes(self) -> int:
        """`buffer_bytes` is the host memory for what is copied and not durable, as it is set or
        derived."""
        return self.save_buffer_bytes or 4 * self.copy_bytes


def decode(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return `extra` as settings. Raises InvalidInput naming the key at fault and the nearest known
    one."""
    _check_keys(extra, ConnectorSettings, "")
    nested = extra.get("soft_reference")
    if isinstance(nested, Mapping):
        _check_keys(nested, SoftReference, "soft_reference.")
    if "store" not in extra:
        raise InvalidInput(
            "kv_connector_extra_config.store", "is missing", "name the artifact store's directory"
        )
    try:
        return msgspec.convert(dict(extra), ConnectorSettings)
    except msgspec.ValidationError as error:
        raise InvalidInput(
            "kv_connector_extra_config", str(error), "see docs/vllm.md for every key"
        ) from error


def _check_keys(given: Mapping[str, Any], struct: type[msgspec.Struct], prefix: str) -> None:
    known = [field.name for field in msgspec.structs.fields(struct)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise InvalidInput(
                f"kv_connector_extra_config.{prefix}{key}",
                "is no setting of OwnerServe",
                f"did you mean {prefix}{near}?",
            )
