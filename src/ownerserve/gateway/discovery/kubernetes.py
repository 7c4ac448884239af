"""A Kubernetes source watches the endpoint slices of one service, by the official client.

    list ──> watch from there ──event──> tell all whom the slices name
     ^            │ server ends it (its time is over): watch on from the last version
     └────────────┴ expired (410), lost, refused: list anew; nobody is removed meanwhile

Owns a thread, since the client blocks, and one connection at a time. The slices are read as JSON:
the client's own models refuse what API servers send (`endpoints: null`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
import urllib3.exceptions

from ownerserve.gateway.discovery.members import Member
from ownerserve.gateway.discovery.places import KubernetesPlace
from ownerserve.gateway.discovery.slices import members_of
from ownerserve.kv.errors import InvalidInput

log = logging.getLogger("ownerserve.gateway")

WATCH_S = 60
"""How long a watch goes on before it is asked for anew: a dead connection is seen then."""
ANSWER_S = 10.0
AGAIN_S = 1.0
AGAIN_MAX_S = 15.0
PAGE = 500
GONE = 410
RIGHTS = "examples/kubernetes/gateway.yaml has the rights that it needs"


class _Refused(Exception):
    """The API server says no, with a status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class KubernetesSource:
    """A Kubernetes source watches one service."""

    def __init__(self, place: KubernetesPlace, *, kubeconfig: Path | None) -> None:
        """Read how the API server is reached: by `kubeconfig`, else as a pod, else by the user's
        own kubeconfig. Raises InvalidInput."""
        self.name = place.source
        self._place = place
        client = kubernetes.client.ApiClient(_configuration(kubeconfig))
        self._api: Any = kubernetes.client.DiscoveryV1Api(client)
        self._slices: dict[str, dict[str, Any]] = {}
        self._response: Any = None
        self._stopped = threading.Event()

    async def watch(
        self, heard: Callable[[Sequence[Member]], None], lost: Callable[[str], None]
    ) -> None:
        """Watch until cancelled."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def call(function: Callable[..., None], *words: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody hears any more
                loop.call_soon_threadsafe(function, *words)

        def run() -> None:
            try:
                self._run(lambda members: call(heard, members), lambda why: call(lost, why))
            finally:
                call(ended.set)

        self._stopped.clear()
        threading.Thread(target=run, name=self.name, daemon=True).start()
        try:
            await ended.wait()
        finally:
            self._stop()

    def _stop(self) -> None:
        """Have the thread end: it may be reading."""
        self._stopped.set()
        connection = getattr(self._response, "connection", None)
        sock = getattr(connection, "sock", None)
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self, heard: Callable[[Sequence[Member]], None], lost: Callable[[str], None]) -> None:
        version, again_s = "", AGAIN_S
        while not self._stopped.is_set():
            try:
                if not version:
                    version = self._list()
                    heard(members_of(self._slices.values(), self._place))
                for seen in self._follow(version):
                    version = seen
                    heard(members_of(self._slices.values(), self._place))
                again_s = AGAIN_S
            except _Refused as error:
                version = ""
                if error.status == GONE:
                    self._stopped.wait(AGAIN_S)
                    continue
                lost(_why(error))
            except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError) as error:
                version = ""
                if not self._stopped.is_set():
                    lost(f"{type(error).__name__}: {error}"[:200])
            except Exception:  # a thread's root: what a server sends must not end the watch
                version = ""
                log.exception("%s: an answer that can't be dealt with", self.name)
                lost("an answer that can't be read")
            if not version:
                self._stopped.wait(again_s)
                again_s = min(again_s * 2, AGAIN_MAX_S)

    def _list(self) -> str:
        """Read all slices of the service; return the version from which to watch."""
        found: dict[str, dict[str, Any]] = {}
        token = None
        while True:
            said = self._asked(limit=PAGE, _continue=token)
            data = json.loads(said.data)
            said.release_conn()
            found |= {one["metadata"]["name"]: one for one in data.get("items") or ()}
            token = data["metadata"].get("continue")
            if not token:
                self._slices = found
                return str(data["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> Iterator[str]:
        """Yield the version after each change, until the server ends the watch."""
        response = self._response = self._asked(
            watch=True, resource_version=version, timeout_seconds=WATCH_S,
            allow_watch_bookmarks=True,
        )  # fmt: skip
        try:
            for line in _lines(response):
                event = json.loads(line)
                kind, one = event["type"], event["object"]
                if kind == "ERROR":
                    raise _Refused(int(one.get("code") or 0), str(one.get("message"))[:200])
                if kind == "DELETED":
                    self._slices.pop(one["metadata"]["name"], None)
                elif kind in ("ADDED", "MODIFIED"):
                    self._slices[one["metadata"]["name"]] = one
                yield str(one["metadata"]["resourceVersion"])
        finally:
            self._response = None
            response.close()
            response.release_conn()

    def _asked(self, **words: Any) -> Any:
        """Return the server's answer, unread. Raises _Refused for a no."""
        given = {name: value for name, value in words.items() if value is not None}
        seconds = WATCH_S + ANSWER_S if "watch" in given else ANSWER_S
        try:
            answer = self._api.list_namespaced_endpoint_slice(
                self._place.namespace,
                label_selector=f"kubernetes.io/service-name={self._place.service}",
                _preload_content=False,
                _request_timeout=(ANSWER_S, seconds),
                **given,
            )
        except kubernetes.client.ApiException as error:
            raise _Refused(int(error.status or 0), str(error.reason)) from error
        if not 200 <= answer.status < 300:
            answer.release_conn()
            raise _Refused(answer.status, str(answer.reason))
        return answer


def _configuration(kubeconfig: Path | None) -> kubernetes.client.Configuration:
    """Return how the API server is reached. Raises InvalidInput."""
    config: Any = kubernetes.config
    configuration = kubernetes.client.Configuration()
    configuration.retries = False
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            path = None if kubeconfig is None else str(kubeconfig)
            config.load_kube_config(path, client_configuration=configuration)
    except Exception as error:  # the client's loader raises whatever a malformed file leads it into
        where = kubeconfig or "neither a pod nor a kubeconfig"
        problem = f"{where}: {' '.join(str(error).split())[:200] or type(error).__name__}"
        mend = "name a kubeconfig with --kubeconfig, or run in a pod with a service account"
        raise InvalidInput("--worker-kubernetes", problem, mend) from error
    return configuration


def _lines(response: Any) -> Iterator[bytes]:
    """Yield the whole lines of an answer as they come."""
    rest = b""
    for part in response.stream(amt=None, decode_content=False):
        *whole, rest = (rest + part).split(b"\n")
        yield from (line for line in whole if line.strip())


def _why(error: _Refused) -> str:
    """Return what the server refused, with the mend where an operator must act."""
    if error.status in (401, 403):
        return f"status {error.status}: it may not list and watch endpointslices; {RIGHTS}"
    return f"status {error.status}: {error}"
