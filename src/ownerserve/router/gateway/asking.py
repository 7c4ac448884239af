"""Who asks, for which model, and like which other session: what a request says before any decision.

Owns the order of looking: headers, then the body's fields, then its content. The body is scanned
only when that tells something: nothing names the session, it comes for the first time (which one
does it begin like?), or the fleet serves several models.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.router.content_chain import ContentChain
from ownerserve.router.gateway.heads import RequestHead
from ownerserve.router.gateway.replies import Rejected
from ownerserve.router.gateway.requests import Request
from ownerserve.router.identity import (
    ANONYMOUS,
    Identity,
    Source,
    content_of,
    identify,
    says_final,
)
from ownerserve.router.messages import Arrive
from ownerserve.router.scan import NO_FIELDS, BodyFields, scan


class Asked(msgspec.Struct, frozen=True, gc=False):
    """A request as the router needs it. `named_parent`: what a header says; `arrive.parent` is
    whose bytes it shares."""

    identity: Identity
    arrive: Arrive
    named_parent: SessionId | None = None


class Asking:
    """Reads requests. `serves_many` is kept by the gateway: the fleet has more than one model."""

    def __init__(self, *, is_known: Callable[[SessionId, str | None], bool]) -> None:
        self.chain = ContentChain()
        self.serves_many = False
        self._is_known = is_known

    def read(self, request: Request) -> Asked:
        """Raises Rejected when the body is needed and can't be believed.

        A request without a body (a listing of models) is no turn of a session.
        """
        body, head = request.body, request.head
        if not body:
            return Asked(ANONYMOUS, Arrive(None, 0))
        tenant = head.tenant
        identity = identify(head.special, NO_FIELDS, tenant=tenant)
        named = identity.session
        if named is not None and not self.serves_many and self._is_known(named, None):
            return Asked(identity, Arrive(named, len(body)), identity.parent)
        fields = _scan_if_it_tells(head, body, is_named=named is not None)
        if named is None:
            identity = identify(head.special, fields, tenant=tenant)
        model = fields.text("model") if self.serves_many else None
        shared_bytes, named_parent = 0, identity.parent
        if identity.session is None or not self._is_known(identity.session, model):
            identity, shared_bytes = self._by_content(identity, fields, head=head)
        return Asked(
            identity,
            Arrive(
                identity.session,
                len(body),
                model=model,
                # What a client calls a parent may begin quite differently: only bytes count.
                parent=identity.parent if shared_bytes else None,
                shared_bytes=shared_bytes or None,
            ),
            named_parent,
        )

    def ended(self, identity: Identity) -> None:
        """A turn is over, whatever became of it."""
        if identity.source is Source.CONTENT and identity.session is not None:
            self.chain.ended(identity.session)

    def _by_content(
        self, identity: Identity, fields: BodyFields, *, head: RequestHead
    ) -> tuple[Identity, int]:
        """Who it is, or like whom it begins, by its content; and for how many bytes."""
        content = content_of(fields, tenant=head.tenant)
        if content is None:
            return identity, 0
        if identity.session is not None:
            place = self.chain.first_turn(identity.session, content)
            parent = place.parent or identity.parent
            return msgspec.structs.replace(identity, parent=parent), place.shared_bytes
        found = self.chain.arrive(content, scope=head.tenant)
        if found is None:
            return identity, 0
        return (
            Identity(found.session, Source.CONTENT, found.parent, says_final(head.special)),
            found.shared_bytes,
        )


def _scan_if_it_tells(head: RequestHead, body: bytes, *, is_named: bool) -> BodyFields:
    """The body's fields. Of a session that a header names, a body that can't be believed says
    nothing; else it is refused."""
    special = head.special
    if special.get(b"content-encoding", b"identity").lower() != b"identity":
        if is_named:
            return NO_FIELDS
        raise Rejected(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "content_encoding",
            "content-encoding: a compressed body can't be routed; send it plain",
        )
    is_json = special.get(b"content-type", b"").lower().startswith(b"application/json")
    if not (is_json or body.lstrip()[:1] == b"{"):
        return NO_FIELDS
    try:
        return scan(body)
    except InvalidInput as error:
        if is_named:
            return NO_FIELDS
        raise Rejected(HTTPStatus.BAD_REQUEST, "invalid_body", str(error)) from error
