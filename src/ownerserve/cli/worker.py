"""`ownerserve worker` runs the reference engine as an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from ownerserve.cache.policies import DEFAULT_EVICTION, SERVED_EVICTIONS
from ownerserve.cli.options import PORT, SEED, Finite, check_host, curve_key_option, fleet_key
from ownerserve.cli.output import OutputFile, OutputFolder, console_for, json_option, write_json
from ownerserve.directory.opening import opener_of
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import LOOPBACK, RPC, TRANSFER, WORKER, Protection, check_reach
from ownerserve.kv.units import format_bytes, parse_bytes
from ownerserve.kv.wire.status import ROLES

if TYPE_CHECKING:
    from ownerserve.engines.hf.build import HfWorker, WorkerOptions
    from ownerserve.kv.wire.curve import FleetKey
    from ownerserve.node.storage.limits import StoreLimits
    from ownerserve.node.transfers.opening import TransferPlace


@click.command()
@click.option(
    "--model",
    default="tiny-v4",
    show_default=True,
    metavar="NAME|FOLDER",
    help="tiny-v4, tiny-qwen3, tiny-gemma3, tiny-gptoss or tiny-qwen3next (random weights, made"
    " in memory), or a folder with config.json, *.safetensors and a tokenizer.",
)
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=WORKER.port,
    show_default=True,
    type=PORT,
    help="Port to listen on; 0 takes a free one and prints it.",
)
@click.option(
    "--kv-memory",
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    help="Memory for all KV state: 4GiB, 80GB, 512M.",
)
@click.option(
    "--max-running",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Sequences computed at once; each holds one state block.",
)
@click.option(
    "--block",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Block length B, a multiple of the model's compression ratios. Default: the model's own.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Prefill chunk, a multiple of the block. Default: 16 blocks.",
)
@click.option(
    "--hca-tail",
    type=click.Choice(["raw", "online"]),
    default="raw",
    show_default=True,
    help="How tokens wait for their HCA window of m' to close (DeepSeek-V4): up to m'-1 rows a"
    " layer, or one online softmax. Same answers and stored state; smaller state blocks.",
)
@click.option(
    "--store",
    type=OutputFolder(),
    metavar="DIR",
    help="Keep idle sessions in a store on disk and bring them back by plan, also after a restart."
    " One worker a directory.",
)
@click.option(
    "--adopt",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    metavar="DIR",
    help="The store of a worker that does not come back: taken over into --store before serving"
    " (`ownerserve store adopt --help`), once. May be given again. One that can't be is a warning.",
)
@click.option(
    "--host-cache",
    default="0",
    show_default=True,
    metavar="SIZE",
    help="Host memory for state that left the device (above the store, when there is one).",
)
@click.option(
    "--remote",
    metavar="DIR|s3://BUCKET/PREFIX|mooncake://NAMESPACE",
    help="Medium below these that many workers share: what one has kept, another restores."
    " Mooncake's own settings (MOONCAKE_MASTER, MOONCAKE_CONFIG_PATH) say which store it is.",
)
@click.option(
    "--remote-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The key of all who share --remote (`ownerserve store new-key FILE`): every record there"
    " bears a MAC, and tenants' records may lie there. Without one whoever can write the medium can"
    " forge what it holds, and tenants' records stay out.",
)
@click.option(
    "--write",
    metavar="POLICY",
    help="Where a copy is written first: write-through[:TIER] (kept is durable there; the default,"
    " to the lowest), write-back[:TIER] or on-eviction. TIER: memory, disk, remote.",
)
@click.option(
    "--spill-after",
    metavar="SECONDS",
    type=Finite(min=0),
    help="How long a session is idle before its state is copied to the store. Default: what its"
    " own gaps make cheapest, once three are known; 0.25 before.",
)
@click.option(
    "--checkpoints",
    default="turn-end",
    show_default=True,
    metavar="POLICY",
    help="Boundaries whose window and recurrent state is stored: full, periodic:N (every N tokens),"
    " zero (windows are replayed), turn-end, branches (and chunk ends where a point is cheap), or"
    " adaptive (from observed reuse and costs).",
)
@click.option(
    "--store-capacity",
    default="80GiB",
    show_default=True,
    metavar="SIZE",
    help="Most bytes that the store holds; a fifth is for window and recurrent state.",
)
@click.option(
    "--range-ttl",
    default=72.0,
    show_default=True,
    metavar="HOURS",
    type=Finite(0, 1e6),
    help="How long KV stays in host memory and store that nobody reads; 0: for ever.",
)
@click.option(
    "--point-ttl",
    default=1.0,
    show_default=True,
    metavar="HOURS",
    type=Finite(0, 1e6),
    help="The same of window and recurrent state.",
)
@click.option(
    "--store-writes",
    default="0",
    show_default=True,
    metavar="SIZE",
    help="Most bytes that are written to the store in a day, compaction included: an SSD lives by"
    " them. At most an hour's worth, or 256 MiB, goes at once; 0: no limit.",
)
@click.option(
    "--store-upkeep",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    type=Finite(min=0),
    help="Interval at which the store drops what is past its TTL and compacts; 0: never.",
)
@click.option(
    "--evict",
    type=click.Choice(SERVED_EVICTIONS),
    default=DEFAULT_EVICTION,
    show_default=True,
    help="What goes first when device memory is short (docs/cache.md): cost is what is cheapest to"
    " bring back, lru what was used longest ago, fifo what came first.",
)
@click.option(
    "--evict-below",
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    type=Finite(0, 100),
    help="Low watermark: make room when less of a pool's slots is free; 0: only when a turn needs"
    " a slot.",
)
@click.option(
    "--evict-to",
    default=5.0,
    show_default=True,
    metavar="PERCENT",
    type=Finite(0, 100),
    help="High watermark: how much of a pool is free then.",
)
@click.option(
    "--rpc-port",
    default=0,
    show_default=True,
    type=PORT,
    metavar="PORT",
    help="Where gateways ask for places (ZeroMQ); 0: a free port.",
)
@click.option(
    "--rpc-host",
    default="127.0.0.1",
    show_default=True,
    help="Address of the RPC port; off loopback it needs --curve-key-file.",
)
@click.option(
    "--transfer-host",
    default="127.0.0.1",
    show_default=True,
    help="Address at which other workers read this one's KV (TCP); off loopback it needs"
    " --curve-key-file.",
)
@click.option(
    "--transfer-port",
    default=0,
    show_default=True,
    type=PORT,
    metavar="PORT",
    help="Its port; 0: a free one. A worker without --store, --host-cache or --remote lends nothing"
    " and reads nothing.",
)
@click.option(
    "--transfer-interface",
    default="",
    metavar="DEVICE",
    help="Network device, as eth1, by which alone KV goes over TCP, to who reads it here and from"
    " whom this one reads; without it any.",
)
@click.option(
    "--transfer-roads",
    default="shm,readv,tcp",
    show_default=True,
    metavar="ROADS",
    help="How it reads other workers' KV, tried in that order: shm and readv reach workers of this"
    " host, tcp all, mooncake and nixl those that name them too (`ownerserve transfer check` says"
    " what is open here). Who names mooncake or nixl is read by them too, by whoever reaches their"
    " ports, on every address: they need --allow-remote.",
)
@click.option(
    "--transfer-arena",
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    help="Memory into which mooncake and nixl write, and nothing else does: what may be written"
    " late, after a failure, is abandoned there.",
)
@click.option(
    "--transfer-digest",
    type=click.Choice(["xxh3", "blake3"]),
    default="xxh3",
    show_default=True,
    help="What verifies KV that came from another worker: xxh3 finds accidents; blake3, under the"
    " key of --curve-key-file, forgery too, and costs more. All of a fleet use the same.",
)
@click.option(
    "--lend-memory",
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Host memory in which lies what other workers read of this one's host cache and store, as"
    " much as is read at once; 0: they read its device alone.",
)
@click.option(
    "--landing-memory",
    default="8GiB",
    show_default=True,
    metavar="SIZE",
    help="Most host memory into which other workers' KV comes, and waits there to be copied to the"
    " device. What finds no room in it is computed.",
)
@click.option(
    "--prefill-peer",
    "prefill_peers",
    multiple=True,
    metavar="ADDRESS",
    help="RPC address (tcp://HOST:PORT) of a worker that may compute long prompts for this one,"
    " where no gateway names one; once for each: of several the one that has the least to do is"
    " asked.",
)
@click.option(
    "--prefill-tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="A prompt of which so much is to be computed is one for a prefill peer.",
)
@click.option(
    "--brings",
    type=click.IntRange(1, 256),
    default=6,
    show_default=True,
    help="So many turns may wait at once for what other workers hold, or compute for them, beside"
    " the four reads of the store: the next one waits until a thread is free.",
)
@click.option(
    "--prefilled",
    type=click.Choice(["keep", "free"]),
    default="keep",
    show_default=True,
    help="What becomes of a prompt that was computed for another worker, once that one has it: it"
    " is kept, and goes before all else when room is short, or it is freed at once.",
)
@click.option(
    "--part-tokens",
    type=click.IntRange(0),
    default=8192,
    show_default=True,
    help="A session's state comes back in parts of so many tokens at most, each into room of its"
    " own; 0: all at once.",
)
@curve_key_option
@click.option(
    "--worker-id",
    metavar="ID",
    help="What the worker calls itself, unlike any other of its fleet. Default: the HOST:PORT at"
    " which it serves.",
)
@click.option(
    "--drain-timeout",
    metavar="SECONDS",
    type=Finite(min=0),
    default=0.0,
    show_default=True,
    help="How long SIGTERM lets the worker leave: it says so to gateways, which send no new turn"
    " and take its sessions, with their state, elsewhere; it ends when nothing is left, or after"
    " so long. 0: at once. Ctrl-C and a second signal end it at once.",
)
@click.option(
    "--role",
    type=click.Choice(ROLES),
    default=ROLES[0],
    show_default=True,
    help="Which part of turns gateways send it: prefill computes prompts for others (and answers"
    " nobody), decode runs turns whose prompts others may compute, hybrid does both. Prompts are"
    " computed apart between workers with --store, --host-cache or --remote. It serves whatever is"
    " sent to it all the same, and is given another role while it is idle:"
    ' POST /ownerserve/role {"role": "decode"}.',
)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option(
    "--directory",
    metavar="URL",
    help="Own sessions: ask this directory whose they are, and tell it of their turns."
    " tcp:// or curve://HOST:PORT of `ownerserve directory serve`, valkey(s):// or"
    " sentinel(s)://, the gateways' own. Default: gateways keep sessions themselves.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Weights of a tiny model.")
@click.option(
    "--threads",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="CPU threads of one forward. More than one rarely helps a tiny model.",
)
@click.option(
    "--ready-file",
    type=OutputFile(),
    help="Written (whole, never partly) with the URL once the worker serves.",
)
@click.option(
    "--allow-remote",
    is_flag=True,
    help="Allow a --host beyond loopback, where nothing is asked: let gateways alone reach it; and"
    " mooncake and nixl among --transfer-roads: let workers alone reach those.",
)
@json_option
def command(json_target: str | None, **flags: object) -> None:
    """Serve one model with block-level, heterogeneous KV caching.

    \b
    ownerserve worker                                   tiny-v4 on 127.0.0.1:8100
    ownerserve worker --port 0 --ready-file /tmp/url    on a free port, for scripts
    ownerserve worker --model ./checkpoint --device cuda --kv-memory 40GiB
    ownerserve worker --store ./kv --host-cache 1GiB    idle sessions survive pressure and restarts
    ownerserve worker --store ./kv --adopt ./dead-kv    and what a dead worker left behind

    \b
    curl localhost:8100/v1/chat/completions -H 'content-type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32}'

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health (answered by the engine
    thread), /metrics (Prometheus), /ownerserve/status (JSON). Name a session with the header
    x-session-id or the field session_id; x-ownerserve-mode and x-ownerserve-cached-tokens in the
    answer say what came of its cache. Ctrl-C stops it.
    """
    _run(json_target, flags)


def _run(json_target: str | None, flags: dict[str, object]) -> None:
    # Before torch is imported, which reads the first one once; nothing is ever downloaded.
    os.environ.setdefault("OMP_NUM_THREADS", str(flags["threads"]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = flags["curve_key_file"]
    key = fleet_key(path if isinstance(path, Path) else None)
    sizes, place = _checked(flags, key), _place(flags, key)
    if os.environ.get("OWNERSERVE_LOG"):
        logging.basicConfig(level=os.environ["OWNERSERVE_LOG"].upper())
    with ExitStack() as closing:
        _serve(json_target, flags, sizes=sizes, place=place, closing=closing)


def _serve(
    json_target: str | None,
    flags: dict[str, object],
    *,
    sizes: dict[str, int],
    place: TransferPlace,
    closing: ExitStack,
) -> None:
    """Serve until told to stop. `closing` gets what is open, however this ends."""
    from ownerserve.engines.hf.http.serve import (
        listen,
        serve,
        url_of,
        worker_id_of,
        write_ready_file,
    )
    from ownerserve.node.rpc.server import RpcServer

    # First: a taken port is known before anything is loaded.
    rpc = RpcServer(host=str(flags["rpc_host"]), port=int(str(flags["rpc_port"])), key=place.key)
    closing.callback(rpc.stop)
    bound = listen(str(flags["host"]), int(str(flags["port"])), protection=_protection(flags))
    closing.callback(bound.close)
    options = replace(_options(flags, sizes), fleet_key=place.key, transfer=place)
    import torch

    from ownerserve.engines.hf.build import build_worker
    from ownerserve.engines.hf.http.leaving import WorkerLeave
    from ownerserve.engines.hf.http.server import make_app
    from ownerserve.engines.hf.metrics.prometheus import RpcCollector

    torch.set_num_threads(int(str(flags["threads"])))
    worker_id = str(flags["worker_id"] or worker_id_of(bound))
    worker = build_worker(replace(options, worker_id=worker_id))
    worker.metrics.registry.register(RpcCollector(rpc.counts))
    url, transfers = url_of(bound), worker.transfers
    if transfers is not None:
        closing.callback(transfers.stop)

    def on_ready() -> None:
        if transfers is not None:
            transfers.start(worker.engine.between_steps, rpc=rpc.address)
        call = worker.engine.call
        answer = call if transfers is None else transfers.answering(call)
        rpc.start(answer, step_s=worker.engine.step_s)
        banner = f"{_banner(url, worker, options)}\n  RPC at {rpc.address}"
        console_for(json_target).print(banner, highlight=False, soft_wrap=True)
        report = _report(url, worker, options) | {"worker": worker_id, "rpc": rpc.address}
        report["role"] = str(flags["role"])
        report["transfer"] = None if transfers is None else transfers.address
        write_json(json_target, "worker", report)
        ready_file = flags["ready_file"]
        if isinstance(ready_file, Path):
            write_ready_file(ready_file, url)

    leaving, leave_s = None, float(str(flags["drain_timeout"]))
    if leave_s > 0:
        leaving = WorkerLeave(leave_s, partial(_leave, worker), partial(_is_needed, worker))
    app = make_app(worker, rpc=rpc.address, role=str(flags["role"]), leaving=leaving)
    serve(app, bound, on_ready=on_ready, leaving=leaving)


async def _leave(worker: HfWorker) -> None:
    await asyncio.wrap_future(worker.engine.between_steps(worker.leave))


async def _is_needed(worker: HfWorker) -> bool:
    return bool(await asyncio.wrap_future(worker.engine.between_steps(worker.is_needed)))


def _checked(flags: dict[str, object], key: FleetKey | None) -> dict[str, int]:
    """Check what can be known to be wrong before a port is taken or anything is loaded, and return
    the sizes in bytes.

    Raises InvalidInput.
    """
    host = str(flags["host"])
    check_host(host)
    check_reach(WORKER, host, _protection(flags))
    keyed = Protection.OPEN if key is None else Protection.KEYED
    check_reach(RPC, str(flags["rpc_host"]), keyed)
    check_reach(TRANSFER, str(flags["transfer_host"]), keyed)
    if flags["worker_id"] == "":
        raise InvalidInput("worker-id", "is empty", "name the worker, or leave the option out")
    if flags["directory"] is not None:
        opener_of(str(flags["directory"]), key)
    if flags["adopt"] and flags["store"] is None:
        raise InvalidInput("--adopt", "there is no store to adopt into", "name one by --store")
    if _size(flags, "store_capacity") < 1:
        raise InvalidInput("--store-capacity", "is 0", "leave --store out for no store")
    names = (
        "kv_memory",
        "host_cache",
        "store_capacity",
        "store_writes",
        "lend_memory",
        "landing_memory",
    )
    return {name: _size(flags, name) for name in names}


def _place(flags: dict[str, object], key: FleetKey | None) -> TransferPlace:
    """Return where other workers read this one."""
    from ownerserve.node.transfers.engines import ENGINES
    from ownerserve.node.transfers.opening import TransferPlace
    from ownerserve.node.transfers.prefills import AfterRead

    roads = tuple(name.strip() for name in str(flags["transfer_roads"]).split(","))
    open_to_all = [name for name in roads if name in ENGINES]
    if open_to_all and not flags["allow_remote"]:
        problem = f"{open_to_all[0]} listens on every address, and nothing is asked there"
        mend = "give --allow-remote, on a network where workers alone reach it"
        raise InvalidInput("--transfer-roads", problem, mend)
    place = TransferPlace(
        str(flags["transfer_host"]),
        int(str(flags["transfer_port"])),
        key=key,
        roads=roads,
        prefill_peers=_prefill_peers(flags),
        arena_bytes=_size(flags, "transfer_arena"),
        digest=str(flags["transfer_digest"]),
        stage_bytes=_size(flags, "lend_memory"),
        landing_bytes=_size(flags, "landing_memory"),
        interface=str(flags["transfer_interface"]),
        after_read=AfterRead(str(flags["prefilled"])),
        brings=int(str(flags["brings"])),
    )
    place.check()
    return place


def _prefill_peers(flags: dict[str, object]) -> tuple[str, ...]:
    named = flags["prefill_peers"]
    return named if isinstance(named, tuple) else ()


def _protection(flags: dict[str, object]) -> Protection:
    return Protection.VOUCHED if flags["allow_remote"] else Protection.OPEN


def _size(flags: dict[str, object], name: str) -> int:
    return parse_bytes(str(flags[name]), field="--" + name.replace("_", "-"))


def _options(flags: dict[str, object], sizes: dict[str, int]) -> WorkerOptions:
    from ownerserve.cache.pressure import Watermarks
    from ownerserve.engines.hf.build import WorkerOptions
    from ownerserve.kv.descriptor import TailForm
    from ownerserve.node.storage.media import DEFAULT_WRITE
    from ownerserve.node.vocabulary.settings import NodeSettings

    store, spill_after = flags["store"], flags["spill_after"]
    adopt = flags["adopt"]
    remote_key = flags["remote_key_file"]
    low, high = (float(str(flags[name])) / 100 for name in ("evict_below", "evict_to"))
    if low > high:
        raise InvalidInput("evict-below", f"{low:.1%} is above --evict-to", "order the watermarks")
    block, chunk = flags["block"], flags["chunk"]
    return WorkerOptions(
        model=str(flags["model"]),
        device=str(flags["device"]),
        kv_bytes=sizes["kv_memory"],
        max_running=int(str(flags["max_running"])),
        block_tokens=None if block is None else int(str(block)),
        chunk_tokens=None if chunk is None else int(str(chunk)),
        seed=int(str(flags["seed"])),
        hca_tail=TailForm.ONLINE if flags["hca_tail"] == "online" else TailForm.RAW_ROWS,
        store=store if isinstance(store, Path) else None,
        adopt=adopt if isinstance(adopt, tuple) else (),
        host_cache_bytes=sizes["host_cache"],
        remote=None if flags["remote"] is None else str(flags["remote"]),
        remote_key_file=remote_key if isinstance(remote_key, Path) else None,
        write=DEFAULT_WRITE if flags["write"] is None else str(flags["write"]),
        node=NodeSettings(
            spill_after_s=None if spill_after is None else float(str(spill_after)),
            part_tokens=int(str(flags["part_tokens"])),
            order_tokens=int(str(flags["prefill_tokens"])) if _prefill_peers(flags) else 0,
        ),
        evict=str(flags["evict"]),
        watermarks=Watermarks(low, high),
        checkpoints=str(flags["checkpoints"]),
        store_limits=_store_limits(flags, sizes),
        directory=None if flags["directory"] is None else str(flags["directory"]),
    )


def _store_limits(flags: dict[str, object], sizes: dict[str, int]) -> StoreLimits:
    from ownerserve.node.storage.limits import StoreLimits

    return StoreLimits(
        disk_bytes=sizes["store_capacity"],
        range_ttl_s=float(str(flags["range_ttl"])) * 3600,
        point_ttl_s=float(str(flags["point_ttl"])) * 3600,
        disk_bytes_per_day=sizes["store_writes"],
        upkeep_s=float(str(flags["store_upkeep"])),
    )


def _banner(url: str, worker: HfWorker, options: WorkerOptions) -> str:
    slots = ", ".join(f"{name} {count:,}" for name, count in worker.sizes.slots.items())
    return (
        f"serving {worker.facts.model} at {url}\n"
        f"  KV memory {format_bytes(options.kv_bytes)}; slots: {slots}, "
        f"state {worker.sizes.state_slots}\n"
        f"  longest sequence {worker.facts.sequence_tokens:,} tokens; Ctrl-C stops"
    )


def _report(url: str, worker: HfWorker, options: WorkerOptions) -> dict[str, object]:
    return {
        "url": url,
        "model": worker.facts.model,
        "kv_bytes": options.kv_bytes,
        "slots": worker.sizes.slots,
        "state_slots": worker.sizes.state_slots,
        "evict": options.evict,
        "sequence_tokens": worker.facts.sequence_tokens,
        "store": None if options.store is None else str(options.store),
        "host_cache_bytes": options.host_cache_bytes,
        "remote": options.remote,
        "write": options.write,
    }
