"""Who joins and who leaves by what sources say: decisions alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.gateway.discovery.members import (
    Change,
    Hold,
    Join,
    Leave,
    Member,
    Members,
    Resume,
)
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.roster import Stay
from ownerserve.kv.ids import WorkerId

A, B, C = (Address(host, 1) for host in "abc")
SERVING, LEAVING = Stay.SERVING, Stay.LEAVING


def test_whom_a_source_names_joins_and_leaves_with_it() -> None:
    members = Members()
    a, b = Member(A), Member(B)
    assert members.heard("dns x", [a, b], here={}) == [Join(a, "dns x"), Join(b, "dns x")]
    here = {A.worker: SERVING, B.worker: SERVING}
    assert members.heard("dns x", [a, b], here=here) == []
    assert members.heard("dns x", [b], here=here) == [Leave(A.worker)]
    assert members.look({**here, A.worker: LEAVING}) == []


def test_one_that_two_sources_name_stays_until_neither_does() -> None:
    members = Members()
    members.heard("x", [Member(A)], here={})
    here = {A.worker: SERVING}
    assert members.heard("y", [Member(A)], here=here) == []
    assert members.heard("x", [], here=here) == []
    assert members.heard("y", [], here=here) == [Leave(A.worker)]


def test_an_operators_worker_is_never_taken_out() -> None:
    members = Members()
    here = {A.worker: SERVING}
    assert members.heard("x", [Member(A), Member(B, is_ready=False)], here=here) == [
        Join(Member(B, is_ready=False), "x")
    ]
    assert members.heard("x", [Member(A, is_ready=False)], here=here) == []
    assert members.heard("x", [], here=here) == []


def test_one_that_is_listed_no_more_stays_while_it_is_named() -> None:
    members = Members()
    here = {A.worker: SERVING}
    members.heard("x", [Member(A, is_ready=False)], here=here)
    assert members.unlisted(A.worker)
    assert members.look(here) == [Hold(A.worker)]
    assert members.heard("x", [], here=here) == [Leave(A.worker)]
    assert not members.unlisted(A.worker)


def test_one_that_is_listed_as_well_is_its_operator_s() -> None:
    members = Members()
    members.heard("x", [Member(A)], here={})
    members.listed(A.worker)
    assert members.heard("x", [], here={A.worker: SERVING}) == []


def test_one_that_an_operator_took_out_stays_away_while_it_is_named() -> None:
    members = Members()
    members.heard("x", [Member(A)], here={})
    for here in ({A.worker: LEAVING}, {}, {}):
        assert members.heard("x", [Member(A)], here=here) == []
    assert members.heard("x", [], here={}) == []
    assert members.heard("x", [Member(A)], here={}) == [Join(Member(A), "x")]


def test_one_that_is_named_again_while_it_leaves_joins_when_it_is_gone() -> None:
    members = Members()
    members.heard("x", [Member(A)], here={})
    assert members.heard("x", [], here={A.worker: SERVING}) == [Leave(A.worker)]
    assert members.heard("x", [Member(A)], here={A.worker: LEAVING}) == []
    assert members.look({A.worker: LEAVING}) == []
    assert members.look({}) == [Join(Member(A), "x")]


def test_readiness_holds_and_resumes() -> None:
    members = Members()
    members.heard("x", [Member(A)], here={})
    here = {A.worker: SERVING}
    assert members.heard("x", [Member(A, is_ready=False)], here=here) == [Hold(A.worker)]
    assert members.heard("x", [Member(A, is_ready=False)], here=here) == []
    assert members.heard("y", [Member(A)], here={A.worker: Stay.UNREADY}) == [Resume(A.worker)]


WORDS = st.lists(
    st.tuples(
        st.sampled_from(["x", "y"]),
        st.dictionaries(st.sampled_from([A, B, C]), st.booleans()),
        st.booleans(),
    ),
    max_size=12,
)


@pytest.mark.slow
@given(WORDS)
def test_the_roster_comes_to_what_the_sources_say(
    words: list[tuple[str, dict[Address, bool], bool]],
) -> None:
    """However sources and departures interleave, in the end the fleet is whom any source names,
    ready if one says so, beside the operator's own (C)."""
    members, here = Members(), {C.worker: SERVING}
    said: dict[str, dict[Address, bool]] = {}

    def apply(changes: list[Change]) -> None:
        for change in changes:
            match change:
                case Join(member):
                    worker = member.address.worker
                    assert worker not in here
                    here[worker] = SERVING if member.is_ready else Stay.UNREADY
                case Leave(worker):
                    assert here[worker] is not LEAVING and worker != C.worker
                    here[worker] = LEAVING
                case Hold(worker):
                    assert here[worker] is SERVING and worker != C.worker
                    here[worker] = Stay.UNREADY
                case Resume(worker):
                    assert here[worker] is Stay.UNREADY
                    here[worker] = SERVING

    def go() -> None:
        for worker in [one for one, stay in here.items() if stay is LEAVING]:
            del here[worker]

    for source, named, is_over in words:
        said[source] = named
        apply(members.heard(source, [Member(a, r) for a, r in named.items()], here=dict(here)))
        if is_over:
            go()
    go()
    apply(members.look(dict(here)))
    wanted: dict[WorkerId, Stay] = {C.worker: SERVING}
    for named in said.values():
        for address, is_ready in named.items():
            if is_ready or address.worker not in wanted:
                wanted[address.worker] = SERVING if is_ready else Stay.UNREADY
    assert here == wanted
