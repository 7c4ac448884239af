"""Tenants: who is let in, and what one may learn of another (fake engines; the real ones are in
tests/engines/hf/test_tenants.py and tests/vllm/test_gateway.py)."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ownerserve.cli.gateway import command
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.http.callers import Caller, KeyedCallers, Salting, digest_of
from ownerserve.gateway.tenants import read_tenants
from ownerserve.kv.errors import InvalidInput
from ownerserve.router.requests.body import Said, pieces, scan
from tests.gateway.test_session_names import CHAT, conversation
from tests.support.gateway.world import Answer, Play, World, header

SECRET = "s" * 40
ACME, GLOBEX, PARTNER = "sk-acme-0123456789", "sk-globex-0123456789", "sk-partner-0123456789"
FILE = f"""
secret = "{SECRET}"

[tenants.acme]
keys = ["{ACME}", "sha256:{hashlib.sha256(b"sk-other-of-acme").hexdigest()}"]

[tenants.globex]
keys = ["{GLOBEX}"]
share = "both"

[tenants.partner]
keys = ["{PARTNER}"]
share = "both"
"""


@pytest.fixture
def tenants(tmp_path: Path) -> KeyedCallers:
    return read_tenants(written(tmp_path, FILE))


def written(folder: Path, text: str, *, mode: int = 0o600) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def salts(world: World) -> list[Any]:
    (engine,) = world.engines
    return [json.loads(body).get("cache_salt") for _, body in engine.seen]


def refused(answer: Answer) -> bool:
    """Whether it is the one answer to all who bring no key that is known."""
    error = json.loads(answer.body)["error"]
    assert answer["www-authenticate"] == "Bearer"
    return (answer.status, error["code"]) == (401, "invalid_api_key")


WRONG = (
    {},
    bearer(""),
    bearer(ACME[:-1]),
    bearer(ACME + "x"),
    bearer(f"sha256:{hashlib.sha256(ACME.encode()).hexdigest()}"),
    {"Authorization": ACME},
    {"Authorization": f"Basic {ACME}"},
    {"X__Api__Key": ACME.upper()},
    {"Authorization": "Bearer \xff\xfe"},
    {**bearer("sk-nobodys-012345678"), "X__Api__Key": ACME},
)


def test_who_brings_no_key_is_told_one_thing_before_its_body_is_read(
    play: Play, tenants: KeyedCallers
) -> None:
    async def scenario(world: World) -> None:
        for headers in WRONG:
            for path in (CHAT, "/v1/messages", "/v1/load_lora_adapter", "/nowhere"):
                client = await world.client()
                assert refused(await client.post(path, b"{not json", **headers)), headers
        client = await world.client()  # a body that does not come
        lines = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 30000000\r\n\r\n"
        client.writer.write(lines.encode())
        assert refused(await client.read())
        for path in ("/v1/models", "/v1/models/x"):
            assert refused(await (await world.client()).get(path))
        assert (await (await world.client()).get("/health")).status == 200
        assert not world.engines[0].seen
        known = world.gateway.turns
        assert not len(known.state.sessions) and not len(known.asking.chain)

    play(scenario, engines=1, tenants=tenants)


def test_a_key_ends_at_the_gateway(play: Play, tenants: KeyedCallers) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for headers in (bearer(ACME), {"X__Api__Key": ACME}, bearer("sk-other-of-acme")):
            assert (await client.post(CHAT, conversation("a", 1), **headers)).status == 200
        for head, _ in world.engines[0].seen:
            assert header(head, b"authorization") is header(head, b"x-api-key") is None
        assert len(set(salts(world))) == 1  # both keys are acme's

    play(scenario, engines=1, tenants=tenants)


def test_each_tenant_has_its_salt_and_a_share_group_one(play: Play, tenants: KeyedCallers) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for key in (ACME, GLOBEX, PARTNER, ACME):
            for said in ({}, {"cache_salt": None}, {"cache_salt": 7}, {"cache_salt": ""}):
                await client.post(CHAT, conversation("a", 1, **said), **bearer(key))
        found = salts(world)
        acme, globex, partner, again = (found[at] for at in (0, 4, 8, 12))
        assert found == [acme] * 4 + [globex] * 4 + [partner] * 4 + [again] * 4
        assert acme == again != globex == partner
        assert all(len(salt) == 64 and set(salt) <= set("0123456789abcdef") for salt in found)

    play(scenario, engines=1, tenants=tenants)


def test_a_clients_own_salt_parts_further_and_joins_nobody(
    play: Play, tenants: KeyedCallers
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        await client.post(CHAT, conversation("a", 1), **bearer(GLOBEX))
        (plain,) = salts(world)
        for key in (ACME, GLOBEX):
            for own in ("mine", plain, "tenant/globex", "x\x00y", "é"):
                await client.post(CHAT, conversation("a", 1, cache_salt=own), **bearer(key))
        assert len(set(salts(world))) == 11

    play(scenario, engines=1, tenants=tenants)


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
)
def test_every_dialect_is_salted_and_otherwise_untouched(
    path: str, play: Play, tenants: KeyedCallers
) -> None:
    bodies = (
        b"{}",
        b" \n{ }",
        b'{"model":"m","messages":[{"role":"user","content":"caf\\u00e9 \xc3\xa9"}] , "n" : 1.0}',
        b'{"user" : "u", "cache_salt" : "mine", "session_id":"s", "prompt":"p"}',
        b'{"prompt": "\\ud800", "user":"u"}',
    )

    async def scenario(world: World) -> None:
        client = await world.client()
        for body in bodies:
            answer = await client.post(path, body, **bearer(ACME), thread__id="t")
            assert answer.status == 200, answer.body
        for given, (head, sent) in zip(bodies, world.engines[0].seen, strict=True):
            read = json.loads(sent)
            assert len(read.pop("cache_salt")) == 64
            wanted = json.loads(given)
            wanted.pop("cache_salt", None)
            if "session_id" in wanted:
                wanted["session_id"] = header(head, b"x-session-id").decode()  # type: ignore[union-attr]
            assert read == wanted
            assert int(header(head, b"content-length") or 0) == len(sent)
        assert world.engines[0].seen[2][1].endswith(bodies[2][1:])

    play(scenario, engines=1, tenants=tenants)


HIDDEN = (
    rb'{"cache\u005fsalt": "theirs"}',
    b'{"cache_salt": "a", "cache_salt": "theirs"}',
    b'{"cache_salt": "a", "prompt": "\\ud800"}',
    b'{"cache_salt": "\xff"}',
)


@pytest.mark.parametrize("body", HIDDEN)
def test_no_salt_is_hidden(body: bytes, play: Play, tenants: KeyedCallers) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        answer = await client.post(CHAT, body, **bearer(ACME), thread__id="t")
        if answer.status == 200:  # half a surrogate pair: no reader reads its salt as another's
            (salt,) = salts(world)
            assert len(salt) == 64 and body.count(b"cache_salt") == 1
        else:
            assert answer.status == 400 and not world.engines[0].seen

    play(scenario, engines=1, tenants=tenants)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/audio/transcriptions", b"--b\r\ncontent-disposition: form-data\r\n\r\nx"),
        (CHAT, b"\xef\xbb\xbf{}"),
        (CHAT, b"[1]"),
        (CHAT, b'"text"'),
    ],
)
def test_what_can_not_be_salted_is_refused(
    path: str, body: bytes, play: Play, tenants: KeyedCallers
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        answer = await client.post(path, body, **bearer(ACME))
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (415, "unsalted")
        assert not world.engines[0].seen

    play(scenario, engines=1, tenants=tenants)


def test_the_routers_own_index_is_parted(play: Play, tenants: KeyedCallers) -> None:
    """Equal conversations, equal ids: other sessions, no parent, nothing expected to be cached;
    also in a share group, whose cached state alone is shared."""

    async def scenario(world: World) -> None:
        client = await world.client()
        names = {}
        for key in (ACME, GLOBEX, PARTNER):
            for turns in (1, 2):
                told = await client.post(CHAT, conversation("a", turns), **bearer(key))
                expected = int(told["x-ownerserve-expected-cached-tokens"] or 0)
                assert (expected > 0) == (turns == 2), (key, turns)
            await client.post(CHAT, conversation("b", 1), **bearer(key), X__Session__Id="mine")
            decided = list(world.gateway.turns.observer.decisions)[-3:]
            identities = [one.identity for one in decided if one.identity]
            assert [one.parent for one in identities] == [None] * 3
            names[key] = {one.session for one in identities}
            assert len(names[key]) == 2
        assert len(set.union(*names.values())) == 6

    play(scenario, engines=1, tenants=tenants)


def test_without_tenants_a_clients_own_salt_stands(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for own in ("mine", "other"):
            for turns in (1, 2):
                told = await client.post(CHAT, conversation("a", turns, cache_salt=own))
                expected = int(told["x-ownerserve-expected-cached-tokens"] or 0)
                assert (expected > 0) == (turns == 2), (own, turns)
        await client.post(CHAT, conversation("a", 1))
        assert salts(world) == ["mine", "mine", "other", "other", None]

    play(scenario, engines=1)


def test_a_key_is_compared_with_all_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[tuple[bytes, bytes]] = []
    same = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or same(a, b))
    callers = KeyedCallers({digest_of(b"%d" % n): Caller(str(n)) for n in range(100)})
    for key in (b"0", b"57", b"99"):
        compared.clear()
        assert callers.of({b"authorization": b"Bearer " + key}).tenant == key.decode()
        assert len(compared) == 100 and {len(one) for pair in compared for one in pair} == {32}


def test_splices_change_nothing_else() -> None:
    """Any order of fields, any white space, any values: the two fields say what is wanted."""
    import random

    draw = random.Random(11)
    for _ in range(2000):
        fields = {f"k{n}": draw.choice([1, 'é"}', None, {"a": [1]}, 1.5]) for n in range(4)}
        for key in ("session_id", "cache_salt"):
            if draw.random() < 0.5:
                fields[key] = draw.choice(["x", None, 7, {"cache_salt": "y"}])
        keys = draw.sample(list(fields), len(fields))
        given = {key: fields[key] for key in keys}
        indent = draw.choice([None, 1])
        body = json.dumps(given, indent=indent, ensure_ascii=draw.random() < 0.5).encode()
        spans = scan(body).spans
        saids = [Said("cache_salt", spans.get("cache_salt"), b'"%b"' % (b"S" * 64))]
        if "session_id" in spans:
            saids.append(Said("session_id", spans["session_id"], b'"%b"' % (b"N" * 32)))
        sent = b"".join(pieces(body, *saids))
        wanted = {**given, "cache_salt": "S" * 64}
        if "session_id" in given:
            wanted["session_id"] = "N" * 32
        assert json.loads(sent) == wanted
        scan(sent)


BAD = {
    "secret = 7": "secret",
    f'secret = "{SECRET}"': "tenants",
    f'secret = "{SECRET}"\n[tenants]': "tenants: names nobody",
    f'secret = "short"\n[tenants.a]\nkeys = ["{ACME}"]': "secret: is shorter",
    f'secret = "{SECRET}"\n[tenants.a]\nkeys = []': "tenants.a.keys: is empty",
    f'secret = "{SECRET}"\n[tenants.a]\nkeys = ["short"]': "tenants.a.keys[0]: is no key",
    f'secret = "{SECRET}"\n[tenants.a]\nkeys = ["{ACME}", "with blanks in it all"]': "keys[1]",
    f'secret = "{SECRET}"\n[tenants.a]\nkeys = ["sha256:12"]': "keys[0]: is no digest",
    f'secret = "{SECRET}"\n[tenants.a]\nkey = ["{ACME}"]': "key",
    f'secret = "{SECRET}"\n[tenants."a b"]\nkeys = ["{ACME}"]': "tenants.a b: is no name",
    f'secret = "{SECRET}"\n[tenants.a]\nkeys = ["{ACME}"]\nshare = ""': "tenants.a.share",
    f'secret = "{SECRET}"\n[tenants]\na.keys = ["{ACME}"]\nb.keys = ["{ACME}"]': "is a's too",
    f'secret = "{SECRET}"\n[tenants.a]\nkeys = ["{ACME}"': "no TOML",
    "\x00": "no TOML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_one_error_that_shows_no_secret(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as told:
        read_tenants(written(tmp_path, text))
    line = str(told.value)
    assert line.startswith("--tenants-file: ") and BAD[text] in line
    assert ACME not in line and SECRET not in line


def test_a_file_that_all_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="read or written by everybody"):
        read_tenants(written(tmp_path, FILE, mode=0o644))
    with pytest.raises(InvalidInput, match="no-such"):
        read_tenants(tmp_path / "no-such")


def test_secrets_are_in_no_repr_and_no_help(tenants: KeyedCallers) -> None:
    config = Config(workers=(Address("127.0.0.1", 1),), tenants=tenants)
    shown = repr(config) + repr(tenants) + repr(Caller("a", Salting(SECRET.encode(), "tenant/a")))
    assert SECRET not in shown and ACME not in shown
    (option,) = [one for one in command.params if "--tenants-file" in one.opts]
    assert "sk-" not in str(getattr(option, "help", ""))


def test_a_gateway_with_tenants_may_be_reached_from_outside(
    play: Play, tenants: KeyedCallers
) -> None:
    async def scenario(world: World) -> None:
        assert refused(await (await world.client()).post(CHAT))

    play(scenario, engines=1, tenants=tenants, host="0.0.0.0")


@pytest.mark.slow
def test_a_bad_file_ends_the_command_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, FILE.replace(SECRET, "short-and-secret"))
    words = ["gateway", "--worker", "http://127.0.0.1:1", "--tenants-file", str(path)]
    ended = subprocess.run(
        [sys.executable, "-m", "ownerserve.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: --tenants-file: secret: is shorter")
    assert "short-and-secret" not in line
