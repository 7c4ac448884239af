"""`ownerserve inspect` as a user meets it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ownerserve.cli.inspect import command
from ownerserve.kv.descriptor import NAMED
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import GIB
from ownerserve.report.state_table import Question, show

GOLDEN = Path(__file__).parent / "golden"
PROMISED = {
    "schema",
    "bytes_per_token",
    "fixed_bytes_per_sequence",
    "bytes_at_context",
    "sessions_fit",
    "dense_equivalent_bytes_per_token",
    "kv_descriptor",
    "components",
}


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(command, [*arguments, "--json", "-"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_the_table_for_v4_pro_reads_as_committed(geometry):
    console = Console(width=140, color_system=None, file=io.StringIO())
    question = Question("deepseek-v4-pro", 1 << 20, 96 * GIB)
    show(question, geometry("deepseek-v4-pro"), NAMED["fp8_ds_mla"], console)
    lines = console.file.getvalue().splitlines()
    shown = "\n".join(line.rstrip() for line in lines) + "\n"
    assert shown == (GOLDEN / "deepseek-v4-pro.txt").read_text()


def test_json_has_what_others_rely_on():
    report = run("deepseek-v4-pro", "--context", "1M", "--hbm", "96GiB")
    assert report.keys() >= PROMISED
    assert report["schema"] == "ownerserve.inspect/1"
    assert report["bytes_per_token"] == pytest.approx(5511, rel=0.005)
    assert report["bytes_at_context"] == pytest.approx(5.38 * GIB, rel=0.005)
    components = report["components"]
    assert all(c.keys() >= {"role", "bytes_per_token", "fixed_bytes"} for c in components)
    assert sum(c["bytes_per_token"] for c in components) == report["bytes_per_token"]
    assert sum(c["fixed_bytes"] for c in components) == report["fixed_bytes_per_sequence"]
    assert report["sessions_fit"] == 17
    assert report["dense_equivalent_sessions_fit"] == 2


def test_without_memory_no_sessions_are_claimed():
    assert run("llama-3.1-8b")["sessions_fit"] is None


def test_a_checkpoint_folder_is_a_config(tmp_path, example):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(example("gpt-oss-20b")))
    report = run(str(folder))
    assert (report["model"], report["family"]) == ("my-model", "gpt_oss")


def test_a_json_file_is_written_beside_the_table(tmp_path):
    target = tmp_path / "out.json"
    result = CliRunner().invoke(command, ["qwen3-next-80b", "--json", str(target)])
    assert "can't be replayed" in result.stdout
    assert json.loads(target.read_text())["exact_replay_tokens"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such-model"], "deepseek-v4-pro"),
        (["llama-3.1-8b", "--kv", "fp9"], "--kv"),
        (["llama-3.1-8b", "--context", "0"], "--context"),
        (["llama-3.1-8b", "--context", "many"], "--context"),
        (["llama-3.1-8b", "--hbm", "lots"], "--hbm"),
        (["deepseek-v4-pro", "--block", "100"], "multiple of 128"),
    ],
)
def test_wrong_input_gets_one_clear_error(arguments, says):
    with pytest.raises(InvalidInput, match=says):
        CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_a_file_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(InvalidInput, match=r"broken\.json"):
        CliRunner().invoke(command, [str(path)], catch_exceptions=False)


def test_help_teaches_by_example():
    text = CliRunner().invoke(command, ["--help"]).output
    assert "ownerserve inspect deepseek-v4-pro --context 1M --hbm 96GiB" in text
    assert "vllm-v4-fp4-indexer" in text.replace("\n", "")
