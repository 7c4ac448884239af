"""A choice is taken up by a gateway that serves: who decides changes between two turns."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ownerserve.gateway.logs import tell
from ownerserve.gateway.rollout.choice import RolloutChoice

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway


def choose(gateway: Gateway, choice: RolloutChoice) -> None:
    """Have turns that come from now on decided so. Raises InvalidInput for a choice that can't
    be.

    Out of normal mode nobody waits for a seat; back in it, the workers' inventories are read, also
    for what nobody here was told of.
    """
    rollout = gateway.turns.rollout
    was_normal = rollout.is_normal
    rollout.choose(choice)
    tell(
        logging.INFO, "steered", mode=choice.mode.value, policy=choice.policy,
        shadow=choice.shadow, canary_policy=choice.canary_policy,
        canary_share=choice.canary_share or None,
    )  # fmt: skip
    if not rollout.is_normal:
        gateway.turns.admission.let_past_seats(gateway.now())
    elif not was_normal:
        for reader in gateway.inventories.values():
            reader.call()
