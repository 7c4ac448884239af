"""Whose an answer is: it goes to the owner of its operation, and to nobody once that has ended."""

from __future__ import annotations

from collections.abc import Iterable

from ownerserve.kv.ids import TurnId
from ownerserve.node.vocabulary.events import Completion, Effect, Kept, NotKept, Start
from ownerserve.node.vocabulary.operations import Operations


class Part:
    """An owner that ends an operation with its first answer."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.heard: list[Completion] = []

    def completed(self, event: Completion, now: float) -> Iterable[Effect]:
        self.heard.append(event)
        self.operations.end(event.operation_id)
        yield Start(TurnId("t"))


def test_an_answer_goes_to_the_owner_of_its_operation_alone_and_once() -> None:
    operations = Operations()
    one, other = Part(operations), Part(operations)
    first, second = operations.begin(one), operations.begin(other)
    assert first != second and len(operations) == 2
    assert operations.complete(Kept(second), 0.0) == [Start(TurnId("t"))]
    assert operations.complete(Kept(second), 0.0) == [], "said twice"
    assert (one.heard, other.heard) == ([], [Kept(second)])


def test_what_comes_of_a_given_up_or_foreign_operation_changes_nothing() -> None:
    operations = Operations()
    part = Part(operations)
    given_up = operations.begin(part)
    operations.end(given_up)
    assert operations.complete(NotKept(given_up), 0.0) == []
    assert operations.complete(Kept(given_up + 1), 0.0) == []
    assert not part.heard and not len(operations)


def test_a_node_that_takes_over_gives_out_no_id_again() -> None:
    before, after = Operations(), Operations()
    old = Part(before)
    ids = {before.begin(old) for _ in range(3)}
    after.go_on_from(before)
    assert after.begin(Part(after)) not in ids
    assert after.complete(Kept(min(ids)), 0.0) == []
