"""A port that answers: on loopback for whoever is there, elsewhere for who has the fleet's keys."""

from __future__ import annotations

import errno

import zmq

from ownerserve.kv.addresses import KEYED, PLAIN, is_loopback
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.wire.curve import OPTION, FleetKey, Guard

LOOPBACK = "127.0.0.1"


class Port:
    """A bound ROUTER socket; one thread's, as all of ZeroMQ's. `what` names it in errors.

    `address` says whether it wants keys (curve.py).
    """

    def __init__(
        self, what: str, host: str, port: int, *, key: FleetKey | None, read_bytes_max: int
    ) -> None:
        if key is None and not is_loopback(host):
            problem = f"{host} is reachable from outside, and there are no keys"
            raise InvalidInput(f"{what} host", problem, f"use {LOOPBACK}, or give {OPTION}")
        self._guard = None if key is None else Guard(key)
        context = zmq.Context.instance() if self._guard is None else self._guard.context
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, read_bytes_max)
        if self._guard is not None:
            self._guard.secure(self.socket)
        place = f"[{host}]" if ":" in host else host
        self.socket.setsockopt(zmq.IPV6, ":" in host)
        try:
            bound = self._bound(place, port)
        except zmq.ZMQError as error:
            self.close()
            if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
                mend = "use an address of this machine"
                raise InvalidInput(f"{what} host", f"{host}: {error}", mend) from error
            problem = f"{place}:{port}: {error}"
            raise InvalidInput(f"{what} port", problem, "use a free one") from error
        self.address = f"{PLAIN if key is None else KEYED}{place}:{bound}"

    def _bound(self, place: str, port: int) -> int:
        if not port:
            return self.socket.bind_to_random_port(PLAIN + place)
        self.socket.bind(f"{PLAIN}{place}:{port}")
        return port

    def close(self) -> None:
        """Free the port."""
        self.socket.close()
        if self._guard is not None:
            self._guard.close()
