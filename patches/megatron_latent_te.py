"""Lets Megatron build multi-head latent attention without Transformer Engine.

The module assumes that Transformer Engine is installed if its names can be imported, which always succeeds: without the
package they are placeholders, and `isinstance` checks against them fail. The patch gives it the flag of the module that
defines the names.
"""

from __future__ import annotations

from megasync_patches import Patch


def _apply() -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = HAVE_TE


PATCH = Patch(
    name="megatron-latent-te",
    package="megatron-core",
    versions=("0.16.1",),
    mended=("0.19.2",),
    reason="latent attention compares its layers with classes that only exist with Transformer Engine",
    apply=_apply,
)
