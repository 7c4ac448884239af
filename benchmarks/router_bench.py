"""The gateway beside two Rust routers and two floors, in one run: `make bench-router`.

    python benchmarks/router_bench.py [--rounds 5] [--seconds 4] [--only ours,nginx] [--loads turn]

Fake engines and load are C (benchmarks/router), built here. The router has a core of its own, load
and engines share another. CPU is what the kernel's scheduler counted for all threads of the
router's processes, over answered requests; a round measures every router once, one after the other,
and the median over rounds counts, with the middle half beside it. Rates are low, as turns come, but
for the two loads that ask without a pause.

Ours has everything on: workers' lines on every answer, a directory of its own process that is asked
of new sessions, tenants' keys (a salt is put into each body), metrics. The others have sessions and
metrics, no keys and no lines: an engine says its lines only to who sends it a turn line.

- sglang: sglang-router 0.3.2, cache_aware; vllm: vllm-router 0.1.17, sticky_least_loaded;
- nginx: one worker, least_conn, kept connections, retries: a relay in C that decides nothing;
- bare: router/bare.py, a relay in Python that decides nothing;
- direct: no router, for latency.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from result import Row, report, versions

HERE = Path(__file__).resolve().parent
RIVALS = HERE.parent / ".venv-routers"
LOG = HERE / "results" / "router_bench.log"
LOAD_CORE, ROUTER_CORE = 0, 1
ENGINES, SESSIONS, EVENTS, GAP_MS = 4, 64, 64, 5
KEY = "sk-bench-0123456789abcdef"
PEERS = ("vllm", "sglang")
NICE = -15


class Load(NamedTuple):
    """One kind of traffic. `rate` requests a second (0: as many as come), `events` of an answer (0:
    it comes in one piece)."""

    name: str
    body_bytes: int
    events: int
    rate: int
    connections: int


LOADS = (
    Load("200 B", 200, 0, 200, 8),
    Load("32 KB", 32 << 10, 0, 60, 8),
    Load("400 KB", 400 << 10, 0, 40, 8),
    Load("stream", 200, EVENTS, 40, 24),
    Load("turn", 400 << 10, EVENTS, 40, 24),
    Load("200 B without pause", 200, 0, 0, 64),
    Load("stream without pause", 200, EVENTS, 0, 256),
)


class Measured(NamedTuple):
    """What one load said of one router. Latency is to the whole answer, of streams to the first
    event."""

    ok: int
    lost: int
    seconds: float
    p50_us: float
    cpu_us: float


class Router(NamedTuple):
    """A router that runs: `pid` None: there is none between load and engine."""

    port: int
    pid: int | None


# Processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.05)
    raise SystemExit(f"{what}: not so after 30 s")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def answers(port: int) -> bool:
    """Whether a router has workers to send a turn to."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({"model": "fake", "messages": [{"role": "user", "content": "hi"}]}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def placed(core: int) -> Callable[[], None]:
    """What puts a new process on one core, and ahead of the machine's other work where we may."""

    def place() -> None:
        os.setsid()
        os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})
        if os.geteuid() == 0:
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
            group = Path("/proc/self/autogroup")
            if group.exists():
                group.write_text(str(NICE))

    return place


@contextmanager
def running(*command: str, core: int) -> Iterator[subprocess.Popen[bytes]]:
    with LOG.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=placed(core))
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def family(pid: int) -> list[int]:
    """The process, its children and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of all threads so far, by the scheduler's clock."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def rss_mb(pids: Sequence[int]) -> float:
    found = [re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
    return sum(int(one[1]) / 1024 for one in found if one)


# Engines and routers


def built(folder: Path, name: str) -> str:
    """The C program `name`, compiled."""
    program = folder / name
    subprocess.run(
        ["gcc", "-O2", "-o", str(program), str(HERE / "router" / f"{name}.c")], check=True
    )
    return str(program)


@contextmanager
def engine(
    program: str, port: int, *, delay_ms: int, stamps: str
) -> Iterator[subprocess.Popen[bytes]]:
    numbers = map(str, (port, delay_ms, GAP_MS, EVENTS))
    with running(program, *numbers, stamps, core=LOAD_CORE) as process:
        wait_until(lambda: listens(port), f"engine on port {port}")
        yield process


@contextmanager
def ours(folder: Path, ports: list[int]) -> Iterator[Router]:
    """OwnerServe's gateway and, on the load's core, a directory."""
    tenants, told, ready = folder / "tenants.toml", folder / "directory", folder / "gateway"
    tenants.touch(0o600)
    tenants.write_text(f'secret = "{"s" * 32}"\n[tenants.bench]\nkeys = ["{KEY}"]\n')
    main = [sys.executable, "-m", "ownerserve.cli.main"]
    serve = [*main, "directory", "serve", "--port", "0", "--ready-file", str(told)]
    with running(*serve, core=LOAD_CORE):
        wait_until(told.exists, "directory")
        directory = told.read_text().split()[-1]
        options = ["--directory", directory, "--tenants-file", str(tenants), "--drain-timeout", "1"]
        options += ["--port", "0", "--admin-port", "0", "--ready-file", str(ready)]
        workers = [part for port in ports for part in ("--worker", f"http://127.0.0.1:{port}")]
        with running(*main, "gateway", *options, *workers, core=ROUTER_CORE) as process:
            wait_until(ready.exists, "gateway")
            yield Router(int(ready.read_text().split()[0].rpartition(":")[2]), process.pid)
    for left in (told, ready):
        left.unlink(missing_ok=True)


@contextmanager
def bare(folder: Path, ports: list[int]) -> Iterator[Router]:
    port = free_port()
    relay = [sys.executable, str(HERE / "router" / "bare.py"), str(port), *map(str, ports)]
    with running(*relay, core=ROUTER_CORE) as process:
        wait_until(lambda: listens(port), "bare relay")
        yield Router(port, process.pid)


NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")


@contextmanager
def nginx(folder: Path, ports: list[int]) -> Iterator[Router]:
    port = free_port()
    servers = "".join(f"server 127.0.0.1:{one} max_fails=1 fail_timeout=1s;" for one in ports)
    config = folder / "nginx.conf"
    config.write_text(
        f"""worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{ access_log off; client_body_buffer_size 1m; client_max_body_size 64m;
 keepalive_requests 1000000000;
 client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
 uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
 upstream engines {{ least_conn; {servers} keepalive 256; keepalive_requests 1000000000; }}
 server {{ listen 127.0.0.1:{port};
  location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_buffering off;
   proxy_next_upstream error timeout non_idempotent; proxy_set_header Connection ""; }} }} }}
"""
    )
    assert NGINX is not None
    with running(NGINX, "-p", str(folder), "-c", str(config), core=ROUTER_CORE) as process:
        wait_until(lambda: listens(port), "nginx")
        yield Router(port, process.pid)


@contextmanager
def rust(program: str, options: list[str], ports: list[int]) -> Iterator[Router]:
    """One of the Rust routers; it looks at its workers' health each second, as ours does."""
    port = free_port()
    workers = [f"http://127.0.0.1:{one}" for one in ports]
    command = [str(RIVALS / "bin" / program), *options, "--worker-urls", *workers]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--health-check-interval-secs", "1"]
    with running(*command, core=ROUTER_CORE) as process:
        wait_until(lambda: listens(port) and answers(port), program)
        yield Router(port, process.pid)


def vllm(folder: Path, ports: list[int]) -> AbstractContextManager[Router]:
    options = ["--policy", "sticky_least_loaded", "--log-level", "warning"]
    return rust("vllm-router", options, ports)


def sglang(folder: Path, ports: list[int]) -> AbstractContextManager[Router]:
    options = ["launch", "--policy", "cache_aware", "--log-level", "warn"]
    return rust("sglang-router", options, ports)


@contextmanager
def direct(folder: Path, ports: list[int]) -> Iterator[Router]:
    yield Router(ports[0], None)


ROUTERS: dict[str, Callable[[Path, list[int]], AbstractContextManager[Router]]] = {
    "ours": ours,
    "vllm": vllm,
    "sglang": sglang,
    "nginx": nginx,
    "bare": bare,
    "direct": direct,
}


# Measuring


def measure(
    program: str,
    load: Load,
    router: Router,
    *,
    seconds: float,
    warm_s: float = 1.0,
    at_begin: Callable[[], None] = lambda: None,
) -> Measured:
    """One run of one load."""
    pids = family(router.pid) if router.pid else []
    numbers = (router.port, load.rate, load.connections, warm_s, seconds, load.body_bytes)
    arguments = [*map(str, (*numbers, load.events, SESSIONS)), KEY]

    with subprocess.Popen(
        [program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=placed(LOAD_CORE),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "BEGIN\n", "the load said something else"
        before = cpu_s(pids)
        at_begin()
        assert process.stdout.readline() == "END\n", "the load said something else"
        used = cpu_s(pids) - before
        said: dict[str, Any] = json.loads(process.stdout.readline())
    return Measured(
        ok=said["ok"],
        lost=said["lost"],
        seconds=said["seconds"],
        p50_us=said["first_p50_us" if load.events else "whole_p50_us"],
        cpu_us=used * 1e6 / max(said["ok"], 1),
    )


class Series(NamedTuple):
    """All rounds of one load at one router."""

    rounds: list[Measured]

    def cpu_us(self) -> float:
        return statistics.median(one.cpu_us for one in self.rounds)

    def span(self) -> tuple[float, float] | None:
        return middle_half([one.cpu_us for one in self.rounds])

    def p50_us(self) -> float:
        return statistics.median(one.p50_us for one in self.rounds)

    def rate(self) -> float:
        return statistics.median(one.ok / one.seconds for one in self.rounds)

    def lost(self) -> int:
        return sum(one.lost for one in self.rounds)


def middle_half(values: list[float]) -> tuple[float, float] | None:
    if len(values) < 3:
        return None
    quarters = statistics.quantiles(values, n=4, method="inclusive")
    return quarters[0], quarters[2]


def told_of(goal: str, value: float, most: float) -> str:
    """The goal, and whether `value` meets it."""
    return f"{goal}: {'met' if value <= most else 'MISSED'}"


def cpu_rows(load: Load, found: dict[str, Series]) -> list[Row]:
    """Ours beside each other router, with the goals that the issue sets."""
    mine = found["ours"]
    best = min(
        (one for one in PEERS if one in found), key=lambda one: found[one].cpu_us(), default=""
    )
    goals = {("turn", best): 0.8, ("turn", "nginx"): 1.4, ("200 B", "vllm"): 0.6}
    rows = []
    for name, other in found.items():
        if name in ("ours", "direct"):
            continue
        share, goal = mine.cpu_us() / other.cpu_us(), goals.get((load.name, name))
        told = "" if goal is None else told_of(f"<= {goal} of it", share, goal)
        rows.append(
            Row(f"{load.name}: cpu", "us", mine.cpu_us(), other.cpu_us(), name, 1 / share, told,
                mine.span(), other.span())
        )  # fmt: skip
        if not load.rate:
            rows.append(
                Row(f"{load.name}: throughput", "1/s", mine.rate(), other.rate(), name,
                    mine.rate() / other.rate())
            )  # fmt: skip
    return rows


def latency_rows(load: Load, found: dict[str, Series]) -> list[Row]:
    """The median latency that each router adds, at a low rate."""
    if not load.rate or "direct" not in found:
        return []
    floor = found["direct"].p50_us()
    added = {name: one.p50_us() - floor for name, one in found.items() if name != "direct"}
    mine = added.pop("ours")
    peers = [added[one] for one in PEERS if one in added]
    return [
        Row(f"{load.name}: added p50", "us", mine, other, name, other / mine if mine else None,
            told_of("<= theirs", mine, min(peers)) if name in PEERS else "")
        for name, other in added.items()
    ]  # fmt: skip


def kill_rows(names: Sequence[str], programs: dict[str, str], folder: Path) -> list[Row]:
    """What is lost when one of the engines is killed at 200 requests a second, 10 ms each, and is
    back two seconds later."""
    lost: dict[str, Measured] = {}
    load = LOADS[0]
    for name in names:
        if name in ("bare", "direct"):
            continue
        with ExitStack() as stack:
            ports = [free_port() for _ in range(ENGINES)]
            lives = [
                stack.enter_context(engine(programs["engine"], port, delay_ms=10, stamps="full"))
                for port in ports
            ]
            router = stack.enter_context(ROUTERS[name](folder, ports))
            killed = lives[1]

            def kill(
                stack: ExitStack = stack,
                killed: subprocess.Popen[bytes] = killed,
                port: int = ports[1],
            ) -> None:
                time.sleep(1)
                killed.send_signal(signal.SIGKILL)
                killed.wait()
                time.sleep(2)
                stack.enter_context(engine(programs["engine"], port, delay_ms=10, stamps="full"))

            lost[name] = measure(programs["load"], load, router, seconds=6, at_begin=kill)
    mine = lost.pop("ours", None)
    if mine is None:
        return []
    told = told_of("0", mine.lost, 0)
    rows = [Row("kill -9 of a worker: lost", "requests", mine.lost, goal=told)]
    return rows + [
        Row("kill -9 of a worker: lost", "requests", mine.lost, one.lost, name, goal=told)
        for name, one in lost.items()
    ]


def missing() -> list[str]:
    """Who can't run here."""
    absent = [] if (RIVALS / "bin" / "vllm-router").exists() else list(PEERS)
    return absent + ([] if NGINX else ["nginx"])


def run(given: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    wanted = given.only.split(",") if given.only else list(ROUTERS)
    names = [name for name in wanted if name not in missing()]
    loads = [one for one in LOADS if not given.loads or one.name in given.loads.split(",")]
    rows: list[Row] = []
    begun = os.getloadavg()[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        programs = {name: built(folder, name) for name in ("engine", "load")}
        if not given.no_kill:
            rows += kill_rows(names, programs, folder)
        ports = [free_port() for _ in range(ENGINES)]
        for port in ports:
            stack.enter_context(engine(programs["engine"], port, delay_ms=0, stamps=given.stamps))
        routers = {name: stack.enter_context(ROUTERS[name](folder, ports)) for name in names}
        for load in loads:
            found: dict[str, Series] = {name: Series([]) for name in names}
            for number in range(given.rounds):
                turned = names[number % len(names) :] + names[: number % len(names)]
                for name in turned:
                    one = measure(programs["load"], load, routers[name], seconds=given.seconds)
                    found[name].rounds.append(one)
                    print(f"{load.name} {name}: {one.cpu_us:,.0f} us, p50 {one.p50_us:,.0f} us,"
                          f" {one.ok} ok, {one.lost} lost", file=sys.stderr)  # fmt: skip
            if "ours" in found:
                rows += [*cpu_rows(load, found), *latency_rows(load, found)]
                rows.append(Row(f"{load.name}: lost", "requests", found["ours"].lost(), goal="0"))
        held = {name: rss_mb(family(one.pid)) for name, one in routers.items() if one.pid}
        mine = held.pop("ours", 0.0)
        rows += [
            Row("rss after all loads", "MB", mine, other, name, other / mine if mine else None,
                told_of("<= 64", mine, 64))
            for name, other in held.items()
        ]  # fmt: skip
    return rows, {"load average": f"{begun:.1f} to {os.getloadavg()[0]:.1f}"}


def told_versions() -> dict[str, str]:
    found = versions(["uvloop", "httptools"])
    if NGINX:
        said = subprocess.run([NGINX, "-v"], capture_output=True, text=True, check=False).stderr
        found["nginx"] = said.strip().rpartition("/")[2]
    for name in ("vllm_router", "sglang_router"):
        for folder in RIVALS.glob(f"lib/*/site-packages/{name}-*.dist-info"):
            found[name] = folder.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--only", help=f"routers, of {','.join(ROUTERS)}")
    parser.add_argument("--loads", help=f"loads, of {','.join(one.name for one in LOADS)}")
    parser.add_argument("--stamps", choices=("full", "line", "none"), default="full")
    parser.add_argument("--no-kill", action="store_true", help="leave the killed worker out")
    given = parser.parse_args()
    if shutil.which("gcc") is None:
        raise SystemExit("gcc is missing: engines and load are compiled as this runs")
    LOG.parent.mkdir(exist_ok=True)
    rows, told = run(given)
    report("router_bench", rows, others={**told_versions(), **told})
    if missing():
        print(f"left out, not installed: {', '.join(missing())}", file=sys.stderr)


if __name__ == "__main__":
    main()
