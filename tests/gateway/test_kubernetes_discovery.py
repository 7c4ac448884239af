"""Workers that are the pods of a Kubernetes service: a fake API server over real HTTP, the gateway
as a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes")

import kubernetes.config.incluster_config as in_cluster
import yaml

from ownerserve.gateway.discovery.kubernetes import KubernetesSource
from ownerserve.gateway.discovery.members import Member
from ownerserve.gateway.discovery.places import parse_kubernetes_place
from ownerserve.gateway.discovery.slices import members_of
from ownerserve.kv.errors import InvalidInput
from tests.gateway.test_roster import PATH, asked, began, served
from tests.support.certificates import Authority
from tests.support.children import ROOT, importing
from tests.support.gateway.kube_api import KubeApi, endpoint, kubeconfig, serving
from tests.support.gateway.process import SHORT, gateway_process, worker_process
from tests.support.waits import until

pytestmark = pytest.mark.slow

Stays = dict[str, tuple[str, bool]]


def test_pods_join_are_held_and_leave(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(worker_process())
        port = first.port
        for host in ("127.0.0.2", "127.0.0.3"):
            stack.enter_context(worker_process(host=host, port=port))
        a, b, c = (f"127.0.0.{n}:{port}" for n in (1, 2, 3))
        api = stack.enter_context(serving(KubeApi()))
        api.set("vllm-1", port, endpoint("127.0.0.1"))
        api.set("vllm-2", port, endpoint("127.0.0.2", ready=False))
        api.set("vllm-6", port, endpoint("::1"), family="IPv6")
        more = ["--worker-kubernetes", "llm/vllm", "--receipts", "open"]
        more += ["--kubeconfig", str(kubeconfig(tmp_path, api))]
        gateway = stack.enter_context(gateway_process(tmp_path, [], *more))
        data, admin = gateway.data_url, gateway.admin_url

        def stays() -> Stays:
            rows = asked(admin, "GET", "/workers")[1]["workers"]
            return {row["worker"]: (row["stay"], row["up"]) for row in rows}

        # known before the port was open: all pages of the list, one family, who is ready
        assert stays() == {a: ("serving", True), b: ("unready", False)}
        assert api.tokens == {"Bearer a-token"}
        assert set(served(data, 6)) == {a}

        # one becomes ready, another comes
        api.set("vllm-2", port, endpoint("127.0.0.2", ready=True))
        api.set("vllm-3", port, endpoint("127.0.0.3", ready=None))
        until(lambda: stays() == dict.fromkeys((a, b, c), ("serving", True)))
        assert set(served(data, 18)) == {a, b, c}

        # one is not ready any more: no new turn; an operator's drain outlasts its readiness
        api.set("vllm-1", port, endpoint("127.0.0.1", ready=False))
        until(lambda: stays()[a] == ("unready", False))
        assert a not in served(data, 6)
        asked(admin, "POST", f"/workers/{a}/drain")
        api.set("vllm-1", port, endpoint("127.0.0.1"))
        api.set("vllm-3", port, endpoint("127.0.0.3", ready=False))
        until(lambda: stays()[c] == ("unready", False))
        assert stays()[a] == ("drained", False)
        asked(admin, "POST", f"/workers/{a}/undrain")
        until(lambda: stays()[a] == ("serving", True))
        api.delete("vllm-3")
        until(lambda: c not in stays())

        # one terminates in mid-stream: its stream ends whole, then it is forgotten
        stream, leaver = stack.enter_context(began(data, f"{PATH}?short-stream"))
        name, host = ("vllm-1", "127.0.0.1") if leaver == a else ("vllm-2", "127.0.0.2")
        api.set(name, port, endpoint(host, ready=False, terminating=True))
        until(lambda: stays().get(leaver, ("gone",))[0] != "serving")
        assert set(served(data, 4)) == {a, b} - {leaver}
        told = stream.read().decode()
        assert told.count('"word"') == SHORT and told.endswith("data: [DONE]\n\n")
        until(lambda: leaver not in stays())
        assert "Traceback" not in gateway.said.read_text()


def test_an_expired_version_a_restart_and_a_refusal_remove_nobody(tmp_path: Path) -> None:
    with ExitStack() as stack:
        worker = stack.enter_context(worker_process())
        api, name = KubeApi(), f"127.0.0.1:{worker.port}"
        server = stack.enter_context(ExitStack())
        server.enter_context(serving(api))
        port = int(api.url.rpartition(":")[2])
        api.set("vllm-1", worker.port, endpoint("127.0.0.1"))
        more = ["--worker-kubernetes", f"llm/vllm:{worker.port}"]
        more += ["--kubeconfig", str(kubeconfig(tmp_path, api))]
        gateway = stack.enter_context(gateway_process(tmp_path, [], *more))

        def stays() -> Stays:
            rows = asked(gateway.admin_url, "GET", "/workers")[1]["workers"]
            return {row["worker"]: (row["stay"], row["up"]) for row in rows}

        def discovery() -> Any:
            return asked(gateway.admin_url, "GET", "/status")[1]["discovery"]["kubernetes llm/vllm"]

        here = {name: ("serving", True)}
        until(lambda: stays() == here)

        # the server ends a watch in good order: it is gone on with, without a list
        lists, watches = api.lists(), api.watches()
        api.end_watches()
        until(lambda: api.watches() > watches)
        assert api.lists() == lists
        # 410 in a watch: it is listed anew
        watches = api.watches()
        api.expire()
        until(lambda: api.lists() > lists and api.watches() > watches)
        assert stays() == here and discovery()["failures"] == 0

        # the server is away, and comes back having forgotten the version
        server.close()
        until(lambda: discovery()["cause"])
        assert stays() == here and asked(gateway.data_url, "POST", PATH, {})[0] == 200
        api.version += 1000
        api.oldest = api.version
        server.enter_context(serving(api, port))
        until(lambda: discovery()["cause"] is None)
        assert stays() == here

        # it refuses: the mend is told, nobody goes
        api.status = 403
        api.end_watches()
        until(lambda: "may not list and watch" in (discovery()["cause"] or ""))
        assert stays() == here
        api.status = 200
        until(lambda: discovery()["cause"] is None)

        # and after all that changes are still heard
        api.set("vllm-1", worker.port, endpoint("127.0.0.1", ready=False))
        until(lambda: stays() == {name: ("unready", False)})
        api.set("vllm-1", worker.port)
        until(lambda: not stays())
        said = gateway.said.read_text()
        assert "Traceback" not in said and "a-token" not in said
        gateway.process.terminate()
        assert gateway.process.wait(60) == 0


def test_a_pod_has_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = Authority(tmp_path)
    token = tmp_path / "token"
    token.write_text("pod-token")
    monkeypatch.setattr(in_cluster, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(in_cluster, "SERVICE_CERT_FILENAME", str(ca.path))
    api = KubeApi()
    api.set("vllm-1", 8000, endpoint("10.0.0.1"))
    with serving(api, tls=ca.issue("api", "127.0.0.1").context()):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.url.rpartition(":")[2])
        source = KubernetesSource(parse_kubernetes_place("llm/vllm:http"), kubeconfig=None)

        async def drive() -> Any:
            words: asyncio.Queue[Any] = asyncio.Queue()
            task = asyncio.create_task(source.watch(words.put_nowait, words.put_nowait))
            try:
                return await asyncio.wait_for(words.get(), 60)
            finally:
                task.cancel()

        found = asyncio.run(drive())
    assert [one.address.worker for one in found] == ["10.0.0.1:8000"]
    assert api.tokens == {"bearer pod-token"}


def of(place: str, *slices: Any) -> list[Member]:
    return members_of(slices, parse_kubernetes_place(place))


def a_slice(*endpoints: Any, ports: list[Any] | None = None, family: str = "IPv4") -> Any:
    ports = [{"name": "http", "port": 8000}] if ports is None else ports
    return {"addressType": family, "endpoints": list(endpoints), "ports": ports}


def test_slices_name_workers() -> None:
    two = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]
    pod = endpoint("10.0.0.1")
    named = {
        place: [one.address.port for one in of(place, a_slice(pod, ports=two))]
        for place in ("llm/vllm", "llm/vllm:http", "llm/vllm:metrics", "llm/vllm:7", "llm/vllm:no")
    }
    assert list(named.values()) == [[], [8000], [9000], [7], []]
    (secured,) = of("https://llm/vllm=m", a_slice(pod))
    assert secured.address.certified == "vllm.llm.svc" and secured.address.models == ("m",)
    both = [a_slice(pod), a_slice(endpoint("fd00::1"), family="IPv6")]
    assert [one.address.host for one in of("llm/vllm", *both)] == ["10.0.0.1"]
    assert [one.address.host for one in of("llm/vllm", both[1])] == ["fd00::1"]
    # in two slices at once, as the API allows while a pod moves between them: ready in one
    twice = [a_slice(endpoint("10.0.0.1", ready=False)), a_slice(pod)]
    assert of("llm/vllm", *twice) == of("llm/vllm", a_slice(pod))
    for odd in ({}, {"addressType": "IPv4"}, a_slice({}), a_slice({"addresses": []}), 7):
        assert of("llm/vllm", odd) == []


@pytest.mark.parametrize(
    "bad", ["vllm", "llm/", "/vllm", "llm/vllm:", "llm/vllm:0", "LLM/vllm", "ftp://llm/vllm",
            "llm/vllm/x", "llm/vllm:70000", "llm/vllm=", ""]
)  # fmt: skip
def test_what_names_no_service_is_refused(bad: str) -> None:
    with pytest.raises(InvalidInput, match="--worker-kubernetes"):
        parse_kubernetes_place(bad)


def test_who_is_in_no_cluster_is_told_in_one_line(tmp_path: Path) -> None:
    words = ["gateway", "--worker-kubernetes", "llm/vllm"]
    command = [sys.executable, "-m", "ownerserve.cli.main", *words]
    environment = importing(HOME=str(tmp_path))
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    environment.pop("KUBECONFIG", None)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: --worker-kubernetes: neither a pod")
    assert "--kubeconfig" in line


FOLDER = ROOT / "examples" / "kubernetes"


def manifests() -> list[Any]:
    paths = sorted(FOLDER.glob("*.yaml"))
    return [one for path in paths for one in yaml.safe_load_all(path.read_text()) if one]


def test_the_examples_manifests_are_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    found = manifests()
    assert {one["kind"] for one in found} >= {"Deployment", "Service", "Role", "RoleBinding"}
    for one in found:
        validate.validate(one, validate.latest_version(), strict=True)


def test_the_examples_gateway_may_do_what_it_does_and_its_options_exist(tmp_path: Path) -> None:
    found = manifests()
    (role,) = [one for one in found if one["kind"] == "Role"]
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    (gateway,) = [
        one for one in found if one["kind"] == "Deployment" and "gateway" in one["metadata"]["name"]
    ]
    (config,) = [one for one in found if one["kind"] == "ConfigMap"]
    pod = gateway["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == role["metadata"]["name"]
    assert container["command"][:2] == ["ownerserve", "gateway"]
    (tmp_path / "gateway.toml").write_text(config["data"]["gateway.toml"])
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "gateway.toml")],
        capture_output=True, text=True, timeout=60, env=importing(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    services = {one["metadata"]["name"] for one in found if one["kind"] == "Service"}
    for place in done.stdout.split():
        named = parse_kubernetes_place(place)
        assert named.service in services
        assert named.namespace == role["metadata"]["namespace"]


READ = """
import sys, tomllib
from pathlib import Path
from ownerserve.cli.gateway import command
from ownerserve.cli.gateway_file import settings_of
said = tomllib.loads(Path(sys.argv[1]).read_text())
assert set(said) <= set(settings_of(command)), said
print(*said["worker-kubernetes"])
"""
