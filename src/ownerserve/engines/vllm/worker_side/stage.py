"""A `Stage` fits commands to one stage of a pipeline: they speak of the first one's layers. Pure.

Every stage keeps something of each component, in blocks of the same KV groups; what differs is how
many layers a record holds. A stage for which that is not so takes no command: what it does not save
counts as not kept, what it does not load as failed, and the whole turn computes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ownerserve.engines.vllm.worker_commands import BlockPlace, LoadInto, SaveCommand


class Stage(msgspec.Struct, frozen=True):
    """A `Stage` is what one pipeline stage keeps, by component: the `descriptors` of its records,
    and how many KV `groups` a place names blocks of."""

    descriptors: Mapping[str, bytes]
    groups: Mapping[str, int]

    def fits(self, *places: BlockPlace) -> bool:
        """Return whether the places mean here what they mean to the scheduler."""
        return all(self.groups.get(place.component) == len(place.blocks) for place in places)

    def save(self, save: SaveCommand) -> SaveCommand:
        """Return the save of a record of this stage's layers."""
        descriptor = self.descriptors[save.place.component]
        return msgspec.structs.replace(
            save, meta=msgspec.structs.replace(save.meta, descriptor=descriptor)
        )

    def load(self, load: LoadInto) -> LoadInto:
        """Return the load of records of this stage's layers."""
        pairs = zip(load.wants, load.places, strict=True)
        wants = tuple(
            msgspec.structs.replace(want, descriptor=self.descriptors[place.component])
            for want, place in pairs
        )
        return msgspec.structs.replace(load, wants=wants)
