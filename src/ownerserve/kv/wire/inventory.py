"""A worker tells what it holds on `GET /ownerserve/inventory?after=N`, in numbered words.

Owns the record and its JSON. A word says of one session and one tier what is there now; a later
one replaces it, so that there is one at most for each (session, tier). Numbers grow within one
life of a worker and mean nothing in another.

    words   1   2   3   4   5   6   7        Gone words up to `floor` are forgotten: who has not
                    ^floor      ^after       read to there begins anew at 0
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.ids import INCARNATION_MAX

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class Has(msgspec.Struct, frozen=True, tag_field="is", tag="has", gc=False):
    """A Has says that tokens [0, `tokens`) of the session lie in `tier` (device, host, disk or
    remote), as its last turn left them. `prefix_hash` names them, in hex; empty: the worker has not
    hashed so far.
    """

    number: Natural
    session: Text
    tier: Text
    tokens: Natural
    prefix_hash: Digest = ""


class Lost(msgspec.Struct, frozen=True, tag_field="is", tag="gone", gc=False):
    """A Lost says that nothing of the session is in `tier` any more."""

    number: Natural
    session: Text
    tier: Text


Word = Has | Lost


class Page(msgspec.Struct, frozen=True):
    """A page holds the words above the number that was asked for, in order, from life `incarnation`
    of `rank`.

    `last` is the highest number given so far; words between the page's last and `last` are asked
    for next. `floor`: words that something is gone are forgotten up to here.
    """

    incarnation: Annotated[int, msgspec.Meta(ge=0, le=INCARNATION_MAX)]
    rank: Natural = 0
    floor: Natural = 0
    last: Natural = 0
    words: tuple[Word, ...] = ()


_DECODER = msgspec.json.Decoder(Page)


def decode_page(data: bytes, *, after: int = 0) -> Page | None:
    """Return the page in `data`; None when it is none, or its numbers do not grow from `after`
    on.
    """
    try:
        page = _DECODER.decode(data)
    except UNREADABLE:
        return None
    for word in page.words:
        if word.number <= after:
            return None
        after = word.number
    return page
