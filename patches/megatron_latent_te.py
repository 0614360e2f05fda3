"""Lets Megatron build multi-head latent attention without Transformer Engine.

Its module takes Transformer Engine to be there when the names could be imported, which they always can: without the
package they are stand-ins, and asking whether a layer is one of them fails. Here it is told that there is none.
"""

from __future__ import annotations

from megasync_patches import Patch


def _apply() -> None:
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = False


PATCH = Patch(
    name="megatron-latent-te",
    package="megatron-core",
    versions=("0.16.1",),
    mended=("0.19.2",),
    reason="latent attention compares its layers with classes that only exist with Transformer Engine",
    apply=_apply,
)
