"""Artifact ids: everything that changes the bytes' meaning changes the id, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.prefix import (
    Approximate,
    Approximation,
    Exact,
    Identity,
    Numerics,
    PointKey,
    RangeKey,
    artifact_id,
    tenant_salt,
)

SECRET = b"s" * 32
BASE = Identity(
    model_id="m",
    weights="w",
    tokenizer="t",
    spec_digest=b"d" * 32,
    numerics=Numerics("bfloat16"),
    tenant_salt=tenant_salt(SECRET, "acme"),
)
HASH = PrefixHash(b"h" * 32)


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "n"},
        {"weights": "x"},
        {"tokenizer": "u"},
        {"adapter": "lora-7"},
        {"multimodal": b"image"},
        {"spec_digest": b"e" * 32},
        {"numerics": Numerics("float16")},
        {"numerics": Numerics("bfloat16", quantization="fp8")},
        {"numerics": Numerics("bfloat16", rope_scaling='{"factor":16}')},
        {"exactness": Approximate(Approximation.BOUNDED_REPLAY)},
        {"tenant_salt": tenant_salt(SECRET, "umbrella")},
        {"config": '{"rms_norm_eps":1e-6}'},
    ],
)
def test_identity_takes_in_every_field(change):
    assert msgspec.structs.replace(BASE, **change).digest() != BASE.digest()


def test_fields_do_not_run_into_each_other():
    one = msgspec.structs.replace(BASE, model_id="ab", weights="c")
    other = msgspec.structs.replace(BASE, model_id="a", weights="bc")
    assert one.digest() != other.digest()


def test_keys_differ_by_everything_they_name():
    digest = BASE.digest()
    keys = [
        RangeKey(HASH, 0, 128, "csa_main"),
        RangeKey(HASH, 0, 256, "csa_main"),
        RangeKey(HASH, 128, 256, "csa_main"),
        RangeKey(HASH, 0, 128, "hca"),
        RangeKey(PrefixHash(b"i" * 32), 0, 128, "csa_main"),
        PointKey(HASH, 128, "swa"),
        PointKey(HASH, 256, "swa"),
        PointKey(HASH, 128, "csa_main"),
    ]
    ids = {artifact_id(digest, key) for key in keys}
    assert len(ids) == len(keys)
    assert artifact_id(digest, keys[0]) == artifact_id(BASE.digest(), keys[0])


def test_identity_round_trips_over_the_wire():
    approximate = msgspec.structs.replace(BASE, exactness=Approximate(Approximation.BOUNDED_REPLAY))
    for identity in (BASE, approximate):
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(identity), type=Identity)
        assert again == identity
        assert again.digest() == identity.digest()
    assert BASE.exactness == Exact()


@pytest.mark.parametrize(
    "make",
    [
        lambda: msgspec.structs.replace(BASE, weights=""),
        lambda: msgspec.structs.replace(BASE, tenant_salt=b"short"),
        lambda: RangeKey(HASH, 5, 5, "hca"),
        lambda: PointKey(HASH, 0, "swa"),
        lambda: tenant_salt(b"short", "acme"),
    ],
)
def test_what_can_not_be_named_is_refused(make):
    with pytest.raises(InvalidInput):
        make()
