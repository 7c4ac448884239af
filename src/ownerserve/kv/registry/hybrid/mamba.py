"""This module makes the state of Mamba layers: what Jamba, Bamba, Nemotron-H and Falcon-H1 have in
common.

Mamba-1    convolution over d_inner channels, state d_inner x d_state
Mamba-2    convolution over d_inner + 2·groups·d_state channels, state heads x d_head x d_state
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import recurrent_pair
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.specs import Precision, StateSpec


class Mamba2(msgspec.Struct, frozen=True):
    """Mamba2 holds the dimensions of a Mamba-2 mixer."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv_kernel: int

    def states(self, kv: KvDescriptor, ssm: Precision) -> tuple[StateSpec, ...]:
        """Return the mixer's recurrent state and its convolution's columns."""
        inner = self.heads * self.head_dim
        channels = inner + 2 * self.groups * self.state
        return recurrent_pair(inner * self.state, channels, self.conv_kernel, ssm=ssm, kv=kv)


def read_mamba2(fields: Fields) -> Mamba2:
    """Read the dimensions from the `mamba_*` fields of Bamba and Falcon-H1.

    `mamba_d_head` may be "auto": the inner size (`mamba_d_ssm`, else `mamba_expand` times the
    hidden size) over the heads. Given as a number, it must agree with that.
    """
    heads = fields.integer("mamba_n_heads")
    if fields.has("mamba_d_ssm"):
        source, inner = "mamba_d_ssm", fields.integer("mamba_d_ssm")
    else:
        source = "mamba_expand"
        inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
    automatic = fields.raw("mamba_d_head") == "auto"
    head_dim = inner // heads if automatic else fields.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise fields.contradiction(
            "mamba_d_head", source, problem=f"{heads} heads of {head_dim} are not {inner}"
        )
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=fields.integer("mamba_n_groups"),
        state=fields.integer("mamba_d_state"),
        conv_kernel=fields.integer("mamba_d_conv", least=2),
    )
