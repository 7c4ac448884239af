"""`ownerserve plan placement`: what it prints and what programs may rely on."""

from __future__ import annotations

from typing import Any

import msgspec
from click.testing import CliRunner

from ownerserve.cli.plan import command

MODEL = "qwen3-30b-a3b"
HOT = "owner holds=110K pending=400K batch=8"


def placed(*arguments: str) -> dict[str, Any]:
    run = CliRunner().invoke(
        command, ["placement", MODEL, *arguments, "--json", "-"], catch_exceptions=False
    )
    assert run.exit_code == 0, run.output
    body = msgspec.json.decode(run.stdout)
    assert body["schema"] == "ownerserve.plan.placement/1"
    return dict(body)


def test_a_hot_owner_is_left_by_migration_and_every_way_is_priced() -> None:
    body = placed("--worker", HOT, "--worker", "pending=2K batch=1")
    decision = body["decision"]
    assert (decision["worker"], decision["action"]) == ("w1", "state_migration")
    assert (decision["source"], decision["reason"]) == ("w0", "hot_owner")
    totals = [way["total"] for way in body["ways"]]
    assert totals == sorted(totals)
    for way in body["ways"]:
        names = ("queue", "compute", "network", "restore", "memory", "duplicate", "interference")
        assert abs(sum(way[name] for name in names) - way["total"]) < 1e-6


def test_policies_differ_on_the_same_scene() -> None:
    scene = ("--worker", HOT, "--worker", "batch=1")
    stays = placed(*scene, "--policy", "sticky")["decision"]
    assert (stays["worker"], stays["reason"]) == ("w0", "owner")


def test_a_long_output_is_prefilled_apart_from_a_crowd() -> None:
    body = placed("--new", "40K", "--worker", "owner holds=110K batch=40 role=decode",
                  "--worker", "holds=110K role=prefill")  # fmt: skip
    assert body["turn"] == "long_tool_output"
    assert (body["decision"]["action"], body["decision"]["prefill"]) == ("remote_prefill", "w1")


def test_a_lost_session_comes_back_from_the_store() -> None:
    body = placed("--worker", "batch=1", "--stored", "110K")
    assert (body["decision"]["action"], body["decision"]["source"]) == ("tail_recompute", "store")


def test_the_table_names_what_is_taken() -> None:
    run = CliRunner().invoke(command, ["placement", MODEL, "--worker", HOT], catch_exceptions=False)
    assert "taken: w0" in run.output


def test_an_unknown_word_is_named_with_the_mend() -> None:
    run = CliRunner().invoke(command, ["placement", MODEL, "--worker", "ownr holds=1K"])
    assert "'ownr' is unknown" in str(run.exception)


def test_a_restore_is_still_the_default() -> None:
    run = CliRunner().invoke(command, [MODEL, "--context", "64K"], catch_exceptions=False)
    assert run.exit_code == 0
    assert "taken:" in run.output
