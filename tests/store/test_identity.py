"""One field of identity changed: another artifact. One field of layout changed: refused."""

from __future__ import annotations

import msgspec
import pytest

from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.prefix import (
    Approximate,
    Approximation,
    Identity,
    Numerics,
    PointKey,
    RangeKey,
    tenant_salt,
)
from ownerserve.store.format.model import ArtifactKind, MissReason, ReadHit, ReadMiss, Want, meta_of
from ownerserve.store.tiers.backend import put

SECRET = b"s" * 32
PREFIX = PrefixHash(b"p" * 32)
IDENTITY = Identity(
    model_id="deepseek-v4-flash",
    weights="sha256:aa",
    tokenizer="sha256:bb",
    spec_digest=b"spec",
    numerics=Numerics("bfloat16", "fp8", '{"factor":16}'),
    tenant_salt=tenant_salt(SECRET, "acme"),
)
KEY = RangeKey(PREFIX, 0, 4096, "csa_main")

CHANGES = {
    "model": {"model_id": "deepseek-v4-pro"},
    "revision": {"weights": "refs/pr/2"},
    "weights digest": {"weights": "sha256:ab"},
    "tokenizer": {"tokenizer": "sha256:bc"},
    "adapter": {"adapter": "lora-7"},
    "multimodal input": {"multimodal": b"image"},
    "spec": {"spec_digest": b"other"},
    "dtype": {"numerics": Numerics("float16", "fp8", '{"factor":16}')},
    "quantisation": {"numerics": Numerics("bfloat16", "mxfp4", '{"factor":16}')},
    "RoPE": {"numerics": Numerics("bfloat16", "fp8", '{"factor":32}')},
    "exactness": {"exactness": Approximate(Approximation.BOUNDED_REPLAY)},
    "tenant": {"tenant_salt": tenant_salt(SECRET, "other")},
}
KEYS = {
    "component": RangeKey(PREFIX, 0, 4096, "csa_index"),
    "range start": RangeKey(PREFIX, 128, 4096, "csa_main"),
    "range end": RangeKey(PREFIX, 0, 8192, "csa_main"),
    "prefix": RangeKey(PrefixHash(b"q" * 32), 0, 4096, "csa_main"),
    "kind": PointKey(PREFIX, 4096, "csa_main"),
}


@pytest.fixture
def stored(open_disk, samples):
    tier = open_disk()
    meta = meta_of(IDENTITY, KEY, tenant=IDENTITY.tenant_salt)
    put(tier, meta, samples.payload(1))
    assert isinstance(tier.read([Want(meta.id)]), ReadHit)
    return tier


def test_no_cross_hit(stored):
    identities = [msgspec.structs.replace(IDENTITY, **change) for change in CHANGES.values()]
    ids = [meta_of(identity, KEY).id for identity in identities]
    ids += [meta_of(IDENTITY, key).id for key in KEYS.values()]
    assert len(set(ids)) == len(CHANGES) + len(KEYS)
    for id_ in ids:
        assert stored.read([Want(id_)]) == ReadMiss(MissReason.ABSENT, id_)


def test_meta_says_what_it_is():
    approximate = msgspec.structs.replace(IDENTITY, **CHANGES["exactness"])
    meta = meta_of(approximate, PointKey(PREFIX, 4096, "swa"))
    assert (meta.kind, meta.first_token, meta.end_token) == (ArtifactKind.POINT, 4096, 4096)
    assert meta.exactness == "approximate/bounded_replay"
    assert meta.precision == "fp8"


LAYOUT = {
    "block_tokens": 128, "page_padding": 576, "tp": 2, "layout_version": 1,
    "engine": "vllm 0.32", "endianness": "little",
}  # fmt: skip


@pytest.mark.parametrize("field", LAYOUT)
def test_layout_of_another_shape_is_refused(open_disk, samples, field):
    """The store's half: a reader that names its layout gets that one or a miss. Converting is
    transfer/layout's, with the descriptor that the verified header carries."""
    tier = open_disk()
    descriptor = msgspec.json.encode(LAYOUT)
    put(tier, samples.meta(1, descriptor=descriptor), samples.payload(1))
    id_ = samples.meta(1).id
    other = msgspec.json.encode(LAYOUT | {field: "changed"})
    assert tier.read([Want(id_, descriptor=other)]) == ReadMiss(MissReason.FOREIGN_LAYOUT, id_)
    assert isinstance(tier.read([Want(id_, descriptor=descriptor)]), ReadHit)
    outcome = tier.read([Want(id_)])
    assert isinstance(outcome, ReadHit)
    assert outcome.parts[0].meta.descriptor == descriptor
