"""A small Kubernetes API server over real HTTP: endpoint slices to list and to watch."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

NAMESPACE, SERVICE = "llm", "vllm"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def endpoint(address: str, *, ready: bool | None = True, terminating: bool = False) -> Any:
    conditions: dict[str, Any] = {"serving": ready, "terminating": terminating}
    if ready is not None:
        conditions["ready"] = ready
    return {"addresses": [address], "conditions": conditions}


class KubeApi:
    """What the server has, and what it was asked. Each change is an event with a version."""

    def __init__(self) -> None:
        self.slices: dict[str, Any] = {}
        self.events: list[tuple[int, str, Any]] = []
        self.version = 100
        self.oldest = 0
        """Versions below are expired: whoever watches from one is told 410."""
        self.status = 200
        """What all that is asked is answered."""
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.changed = threading.Condition()
        self.life = 0
        """Watches of an earlier life end."""
        self.is_away = False
        """Nobody is answered, at connections of before either."""
        self.url = ""

    def set(self, name: str, port: int, *endpoints: Any, family: str = "IPv4") -> None:
        """Write a slice; without endpoints it has null in their place, as API servers say it."""
        with self.changed:
            kind = "MODIFIED" if name in self.slices else "ADDED"
            self.version += 1
            self.slices[name] = {
                "metadata": {"name": name, "resourceVersion": str(self.version)},
                "addressType": family,
                "endpoints": list(endpoints) or None,
                "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
            }
            self._tell(kind, self.slices[name])

    def delete(self, name: str) -> None:
        with self.changed:
            self.version += 1
            gone = self.slices.pop(name)
            gone = {**gone, "metadata": {"name": name, "resourceVersion": str(self.version)}}
            self._tell("DELETED", gone)

    def expire(self) -> None:
        """Forget all versions so far: watches end, and none goes on from an old one."""
        with self.changed:
            self.version += 1
            self.oldest, self.life = self.version, self.life + 1
            self.changed.notify_all()

    def end_watches(self) -> None:
        """As the server does when their time is over."""
        with self.changed:
            self.life += 1
            self.changed.notify_all()

    def _tell(self, kind: str, one: Any) -> None:
        self.events.append((self.version, kind, one))
        self.changed.notify_all()

    def watches(self) -> int:
        return sum("watch=" in asked for asked in self.asked)

    def lists(self) -> int:
        return sum("watch=" not in asked for asked in self.asked)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: KubeApi

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        api, place = self.api, urlsplit(self.path)
        if api.is_away:
            self.close_connection = True
            return
        query = {name: values[-1] for name, values in parse_qs(place.query).items()}
        api.asked.append(self.path)
        api.tokens.add(self.headers.get("authorization", ""))
        status = api.status
        if place.path != PATH:
            status = 404
        elif query.get("labelSelector") != f"kubernetes.io/service-name={SERVICE}":
            status = 400
        if status != 200:
            self._json(status, {"kind": "Status", "code": status, "message": "no"})
        elif "watch" in query:
            self._watch(int(query["resourceVersion"]))
        else:
            self._list(query)

    def _list(self, query: dict[str, str]) -> None:
        """One slice a page, whatever is asked for."""
        api = self.api
        with api.changed:
            items, version = list(api.slices.values()), api.version
        at = int(query.get("continue", 0))
        metadata = {"resourceVersion": str(version)}
        if at + 1 < len(items):
            metadata["continue"] = str(at + 1)
        self._json(200, {"metadata": metadata, "items": items[at : at + 1] or None})

    def _watch(self, version: int) -> None:
        api = self.api
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        life, is_old = api.life, version < api.oldest
        try:
            if is_old:
                told = {"kind": "Status", "code": 410, "message": "too old resource version"}
                self._chunk({"type": "ERROR", "object": told})
            while not is_old:
                with api.changed:
                    new = [event for event in api.events if event[0] > version]
                    if not new and life == api.life:
                        api.changed.wait(0.5)
                        new = [event for event in api.events if event[0] > version]
                    if life != api.life:
                        break
                for number, kind, one in new:
                    self._chunk({"type": kind, "object": one})
                    version = number
                if not new:
                    bookmark = {"metadata": {"resourceVersion": str(version)}}
                    self._chunk({"type": "BOOKMARK", "object": bookmark})
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _chunk(self, event: Any) -> None:
        data = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


@contextmanager
def serving(api: KubeApi, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[KubeApi]:
    """The API server at a port of 127.0.0.1, until the end."""
    server = _Server(("127.0.0.1", port), type("Handler", (_Handler,), {"api": api}))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    api.is_away = False
    api.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield api
    finally:
        api.is_away = True
        api.end_watches()
        server.shutdown()
        server.server_close()
        thread.join()


def kubeconfig(folder: Path, api: KubeApi, token: str = "a-token") -> Path:
    """A user's file that says how this server is reached."""
    path = folder / "kubeconfig"
    said = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(said))
    return path
