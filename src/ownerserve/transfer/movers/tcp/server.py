"""The side that lends over TCP: a bound port and one thread that serves all who read from it.

The thread waits in one selector, for ever where nothing is to be done. No connection waits for
another: a part is sent at a time, as far as its socket takes it, and one that takes nothing is
dropped. Who has not shown the key costs a bounded number of connections, a few hundred bytes each.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import time
from threading import Thread

from ownerserve.kv.errors import Corrupt
from ownerserve.kv.listening import LOOPBACK, TRANSFER, Protection, open_listener
from ownerserve.transfer.movers.port import Lender
from ownerserve.transfer.movers.tcp.handshake import NONCE_BYTES, LenderHandshake, TransferKey
from ownerserve.transfer.movers.tcp.serving import ServedReader
from ownerserve.transfer.movers.tcp.settings import LenderSettings, keep_to, tune

log = logging.getLogger("ownerserve.transfer")

BACKLOG = 128
TICK_S = 0.25
"""How often deadlines are looked at while there are some."""
WARNED_MAX = 1024


class TcpServer:
    """A `TcpServer` lends what `lender` says, from construction until `close`. Owns its port, its
    connections and its thread. Raises InvalidInput for a port that can't be had, or that others
    reach while there is no key; OSError for an interface that is not there."""

    def __init__(
        self,
        lender: Lender,
        host: str = LOOPBACK,
        *,
        port: int = TRANSFER.port,
        key: TransferKey | None = None,
        settings: LenderSettings | None = None,
    ) -> None:
        self._lender, self._key = lender, key
        self._settings = settings or LenderSettings()
        protection = Protection.OPEN if key is None else Protection.KEYED
        self._listener = open_listener(TRANSFER, host, port, protection=protection)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        try:
            keep_to(self._listener, self._settings.interface)
            self._listener.settimeout(0)
            self._listener.listen(BACKLOG)
        except OSError:
            self._free()
            raise
        self.host, self.port = self._listener.getsockname()[:2]
        self._served: set[ServedReader] = set()
        self._warned: set[str] = set()
        self._closing = False
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name="lend-tcp", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Count the connections that there are now."""
        return len(self._served)

    def close(self) -> None:
        """Stop serving. Returns when no memory is read any more; a second call does nothing."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._free()

    def _free(self) -> None:
        self._selector.close()
        self._listener.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._round()
            except Exception:  # the thread's root: others are served on
                log.exception("a round of the transfer server failed")
                time.sleep(TICK_S)
        for served in list(self._served):
            self._drop(served)

    def _round(self) -> None:
        awaits = any(one.deadline_s < math.inf for one in self._served)
        for key, _ in self._selector.select(TICK_S if awaits else None):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, ServedReader):
                self._advance(key.data)
        if awaits:
            now_s = time.monotonic()
            for late in [one for one in self._served if one.deadline_s <= now_s]:
                self._drop(late)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left: whoever waits, waits
            log.warning("the transfer port takes nobody: %s", error.strerror)
            time.sleep(TICK_S)
            return
        if len(self._served) >= self._settings.connections_max:
            unknown = [one for one in self._served if not one.is_known]
            if not unknown:
                sock.close()
                return
            self._drop(min(unknown, key=lambda one: one.deadline_s))
        tune(sock)
        handshake = LenderHandshake(self._key, os.urandom(NONCE_BYTES))
        served = ServedReader(sock, self._lender, handshake=handshake, now_s=time.monotonic(),
                              settings=self._settings)  # fmt: skip
        self._served.add(served)
        self._selector.register(sock, served.events, served)

    def _advance(self, served: ServedReader) -> None:
        if served not in self._served:
            return  # dropped in this round, for one that came
        events = served.events
        try:
            served.advance(time.monotonic())
        except (OSError, Corrupt) as error:
            self._tell(served, error)
            self._drop(served)
            return
        except Exception:  # the lender's own: this reader's loss, nobody else's
            log.exception("a reader could not be served")
            self._drop(served)
            return
        if served.events != events:
            self._selector.modify(served.socket, served.events, served)

    def _tell(self, served: ServedReader, error: Exception) -> None:
        if not isinstance(error, Corrupt):
            return
        try:
            host = str(served.socket.getpeername()[0])
        except OSError:
            return
        if host not in self._warned and len(self._warned) < WARNED_MAX:
            self._warned.add(host)
            log.warning("%s is not served: %s", host, error)

    def _drop(self, served: ServedReader) -> None:
        self._served.discard(served)
        self._selector.unregister(served.socket)
        served.socket.close()
