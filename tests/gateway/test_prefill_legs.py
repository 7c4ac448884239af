"""A turn whose prompt is computed at one worker and answered at another, in a running gateway over
processes: plain engines whose operator says which is which."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from ownerserve.gateway.exchange.apart import handed_over, prefill_saids
from ownerserve.gateway.http.access import parse_worker
from ownerserve.kv.errors import InvalidInput
from ownerserve.router.requests.body import pieces, scan
from ownerserve.router.worker import WorkerRole
from tests.support.gateway.talker import TalkerProcess, talker_process, words_of
from tests.support.gateway.talking import MESSAGES, TalkingFleet, talking_fleet
from tests.support.waits import until


class Fleet(NamedTuple):
    """A prefill worker, a decode worker, and a gateway over them."""

    prefill: TalkerProcess
    decode: TalkerProcess
    world: TalkingFleet


@contextmanager
def fleet(folder: Path, *more: str) -> Iterator[Fleet]:
    with talking_fleet(folder, ["prefill", "decode"], "--policy", "static_pd", *more) as world:
        yield Fleet(*world.talkers, world)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


TEXT = "".join(words_of(MESSAGES, None))


@pytest.mark.slow
def test_a_prompt_is_computed_at_one_worker_and_answered_at_another(tmp_path: Path) -> None:
    with fleet(tmp_path) as (prefill, decode, world):
        answer = world.ask(
            max_tokens=77, max_completion_tokens=66, min_tokens=5, n=1, session_id="s"
        )
        assert text_of(answer) == TEXT
        assert answer.headers["x-ownerserve-action"] == "remote_prefill"
        [(asked, prompt)] = prefill.tell()["seen"]
        assert (prompt["max_tokens"], prompt["max_completion_tokens"]) == (1, 1)
        assert (prompt["stream"], prompt["min_tokens"], prompt["n"]) == (False, 0, 1)
        assert prompt["kv_transfer_params"]["do_remote_decode"] is True
        assert prompt["session_id"] is None, "who prefills for another binds no session"
        assert "x-ownerserve-session" not in asked
        assert "x-session-id" not in asked.lower()
        [(told, turn)] = decode.tell()["seen"]
        assert (turn["max_tokens"], turn["max_completion_tokens"], turn["min_tokens"]) == (
            77,
            66,
            5,
        )
        assert turn["kv_transfer_params"] == {
            "do_remote_prefill": True,
            "remote_port": prefill.port,
            "remote_block_ids": [[1, 2]],
        }
        assert "x-session-id" in told
        assert world.legs("prefill") == {"done": 1}
        streamed = world.ask(stream=True, stream_options={"include_usage": True})
        assert "[DONE]" in streamed.text
        assert "usage" in streamed.text
        _, prompt = prefill.tell()["seen"][1]
        assert (prompt["stream"], prompt["stream_options"]) == (False, None)
        prefill.tell(params=False)  # one that is found by its content
        assert text_of(world.ask()) == TEXT
        assert "kv_transfer_params" not in decode.tell()["seen"][2][1]
        assert world.legs("prefill") == {"done": 3}
        models = httpx.get(f"{world.gateway.data_url}/v1/models", timeout=30).json()
        assert [model["id"] for model in models["data"]] == ["m"]
        assert world.live() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "outcome"),
    [
        ({"refuses_prefill": 503}, "refused"),
        ({"refuses_prefill": 400}, "refused"),
        ({"torn": True}, "closed"),
    ],
)
def test_a_failed_prefill_fails_no_turn(tmp_path: Path, does: dict[str, Any], outcome: str) -> None:
    with fleet(tmp_path) as (prefill, decode, world):
        prefill.tell(**does)
        answer = world.ask()
        assert text_of(answer) == TEXT
        assert answer.headers["x-ownerserve-reason"] == "not_split"
        assert answer.headers["x-ownerserve-action"] == "colocated_prefill"
        assert "kv_transfer_params" not in decode.tell()["seen"][0][1]
        assert (world.legs("prefill"), world.live()) == ({outcome: 1}, 0)


def waiting(fleet: Fleet) -> http.client.HTTPConnection:
    """A client of a turn whose prompt is being computed."""
    fleet.prefill.tell(mute=True)
    client = fleet.world.begin()
    until(lambda: fleet.prefill.tell()["seen"], within_s=30)
    return client


@pytest.mark.slow
def test_either_worker_is_killed_while_a_prompt_is_computed(tmp_path: Path) -> None:
    with fleet(tmp_path, "--drain-timeout", "0") as (prefill, decode, world):
        client = waiting(Fleet(prefill, decode, world))
        prefill.kill()
        answer = client.getresponse()
        assert (answer.status, answer.headers["x-ownerserve-reason"]) == (200, "not_split")
        assert json.loads(answer.read())["choices"][0]["message"]["content"] == TEXT
        client.close()
        assert world.live() == 0
        again = world.ask()  # nobody prefills any more
        assert text_of(again) == TEXT
        assert again.headers["x-ownerserve-reason"] in ("not_split", "not_offered")
    other = tmp_path / "other"
    other.mkdir()
    with fleet(other) as (prefill, decode, world):
        client = waiting(Fleet(prefill, decode, world))
        decode.kill()
        prefill.tell(go=True)
        told = client.getresponse()
        assert told.status in (502, 503), "nobody is left to answer"
        client.close()
        assert world.live() == 0


@pytest.mark.slow
def test_a_client_that_hangs_up_ends_the_prefill(tmp_path: Path) -> None:
    with fleet(tmp_path) as (prefill, decode, world):
        client = waiting(Fleet(prefill, decode, world))
        assert world.live() >= 1
        client.close()
        until(lambda: prefill.tell()["hung_up"] == 1, within_s=30)
        until(lambda: world.live() == 0, within_s=30)
        assert decode.tell()["seen"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("roles", "code"), [(("prefill", "decode"), 0), (("", ""), 1)])
def test_a_check_says_whether_prompts_can_be_computed_apart(
    roles: tuple[str, str], code: int
) -> None:
    with talker_process() as one, talker_process() as other:
        words = ["--check", "--policy", "static_pd"]
        for role, port in zip(roles, (one.port, other.port), strict=True):
            url = f"http://127.0.0.1:{port}"
            words += ["--worker", f"{role}+{url}" if role else url]
        command = [sys.executable, "-m", "ownerserve.cli.main", "gateway", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "role: prefill" in done.stdout) == (code, code == 0), done.stdout


# What is said


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/completions?x=1", "max_tokens"),
        ("/v1/messages", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
def test_every_api_is_asked_for_one_token(path: str, limit: str) -> None:
    for body in (b"{}", b'{"a": 1, "%b": 9, "stream": true, "store": true}' % limit.encode()):
        fields = scan(body)
        said = json.loads(b"".join(pieces(body, *prefill_saids(path.encode(), fields))))
        assert (said[limit], said["stream"]) == (1, False)
        assert said["kv_transfer_params"]["do_remote_decode"] is True
        assert said.get("store", False) is False
        assert said.get("a") == json.loads(body).get("a")


def test_what_has_no_prompt_is_computed_by_nobody_else() -> None:
    assert prefill_saids(b"/v1/embeddings", scan(b'{"input": "x"}')) == []


def test_what_a_prefill_answers_goes_on_as_it_came() -> None:
    params = b'{"remote_block_ids": [[1,  2]], "x": 1e3}'
    [said] = handed_over(b'{"id": "x", "kv_transfer_params": %b}' % params) or []
    assert (said.key, said.value) == ("kv_transfer_params", params)
    assert handed_over(b'{"id": "x"}') == handed_over(b'{"kv_transfer_params": 3}') == []
    assert handed_over(b"no json") is None


def test_a_role_is_said_before_the_url() -> None:
    address = parse_worker("decode+http://127.0.0.1:8001=a+b")
    assert (address.role, address.models, address.port) == (WorkerRole.DECODE, ("a+b",), 8001)
    assert parse_worker("http://127.0.0.1:8001=a+b").role is None
    for wrong in ("master+http://a:1", "prefill+decode+http://a:1", "+http://a:1"):
        with pytest.raises(InvalidInput):
            parse_worker(wrong)
