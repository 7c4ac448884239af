"""What a worker could send of a prompt from its host memory."""

from __future__ import annotations

import pytest

from ownerserve.kv.prefix import pack
from tests.support.sim.sim_node_driver import SimNodeDriver, disk, host

LONG = 500


def put_away(config: str = "qwen3-30b-a3b", *, below: bool = False) -> tuple[SimNodeDriver, bytes]:
    """A session whose state is in host memory (or, `below`, on a disk alone), off the device."""
    driver = SimNodeDriver([disk()] if below else [host(), disk()], config=config)
    ids = driver.fresh(LONG)
    driver.turn("a", ids)
    driver.rest()
    driver.forget_device()
    return driver, pack(ids)


@pytest.mark.parametrize("config", ["qwen3-30b-a3b", "deepseek-v4-flash"])
def test_all_that_was_put_away_can_be_sent(config: str) -> None:
    driver, prompt = put_away(config)
    whole = len(prompt) // 4 // driver.block * driver.block
    assert driver.cache.match(prompt).range_tokens == 0
    assert driver.node.stored_units(prompt) == whole


def test_a_prompt_that_parts_can_be_sent_up_to_the_record_before() -> None:
    driver, prompt = put_away()
    grid = driver.node.state.names.blocks * driver.block
    part = prompt[: 4 * (3 * grid + 1)] + pack(driver.fresh(200))
    assert driver.node.stored_units(part) == 3 * grid


def test_a_hole_ends_it() -> None:
    driver, prompt = put_away()
    names, grid = driver.node.state.names, driver.node.state.names.blocks
    digests = driver.node.state.chains.peek(prompt)
    second = names.range_id(names.range_names[0], names.cell_ending_at(2 * grid), digests)
    driver.store.tiers[0].remove(second)
    assert driver.node.stored_units(prompt) == grid * driver.block


def test_a_disk_sends_nothing() -> None:
    driver, prompt = put_away(below=True)
    assert driver.node.stored_units(prompt) == 0
    assert driver.node.stored_units(pack(driver.fresh(40))) == 0
