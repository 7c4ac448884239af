"""Hosts are the names under which an admin port without a key answers.

A page of any site may have its own name looked up anew as 127.0.0.1 (DNS rebinding): a browser then
lets it read the admin port of whoever looks at it, as the page's own. It still says that name as
Host. So the port answers to addresses, which nobody can look up anew, to localhost, and to the host
that the operator gave it. Where a key is asked for such a page has none.
"""

from __future__ import annotations

from http import HTTPStatus
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from ownerserve.gateway.admin_api.answers import ErrorRow
from ownerserve.gateway.admin_api.endpoints import problem_response

_LOCAL = "localhost"


class KnownHosts:
    """`app`, for those who ask by an address, by localhost or as `configured`."""

    def __init__(self, app: ASGIApp, configured: str) -> None:
        self._app = app
        self._configured = configured.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = [value for name, value in scope["headers"] if name == b"host"]
        if all(self._is_known(value.decode("latin-1")) for value in told):
            await self._app(scope, receive, send)
            return
        problem = ErrorRow(
            code="unknown_host",
            field="host",
            message="host: is no name of this port: a page of another site may be asking",
            mend=f"ask by address, or as {_LOCAL}; under other names with --admin-key-file",
        )
        await problem_response(HTTPStatus.FORBIDDEN, problem)(scope, receive, send)

    def _is_known(self, told: str) -> bool:
        host = told.lower()
        if host.startswith("["):
            host = host[1:].partition("]")[0]
        else:
            host = host.partition(":")[0]
        return host in (_LOCAL, self._configured) or _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
