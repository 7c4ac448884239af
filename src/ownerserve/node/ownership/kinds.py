"""Which kinds of state, by the directory's owner rules, a cache's components are. Pure."""

from __future__ import annotations

from ownerserve.cache.layout import Layout
from ownerserve.directory.rules import Kind, Kinds, kind_of
from ownerserve.kv.specs import Coverage, Role

_ROLES = {role.value: role for role in Role}


def kinds_of(layout: Layout, coverage: Coverage) -> Kinds:
    """By which owner rules the components of a layout that have `coverage` go."""
    kinds = 0
    for component in layout.components:
        if component.coverage is not coverage:
            continue
        if coverage is Coverage.POINT:
            kinds |= Kind.CHECKPOINT
        else:
            role = _ROLES.get(component.name)
            kinds |= Kind.DENSE if role is None else kind_of(role)
    return int(kinds)
