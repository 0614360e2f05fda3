"""Stand-in for sgl_kernel: nothing here is called, but for the hash behind seeded sampling, which is real.

SGLang draws a seeded token with Gumbel noise hashed from (seed, position, vocabulary id) and looks for the hash as the
operator ``sgl_kernel::murmur_hash32_cpu``. It is MurmurHash3 (32 bit, Austin Appleby's public-domain algorithm) over
four words: low and high half of the seed, the position, the vocabulary id.
"""

import _absent
import torch

__getattr__ = _absent.install("sgl_kernel")

_MASK = 0xFFFFFFFF
_BYTES = 16


def _rotate(x, bits):
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _mix(h, word):
    # int64 products wrap, which leaves their low 32 bits right.
    k = _rotate((word * 0xCC9E2D51) & _MASK, 15)
    h = h ^ ((k * 0x1B873593) & _MASK)
    return (_rotate(h, 13) * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed, positions, columns):
    """Hashes in [0, 2**32) as int64 [rows, columns], from seed [rows] (uint64), positions [rows], columns [columns]."""
    seed = seed.view(torch.int64)
    h = _mix(torch.zeros_like(seed), seed & _MASK)
    h = _mix(h, (seed >> 32) & _MASK)
    h = _mix(h, positions.to(torch.int64) & _MASK)
    h = _mix(h[:, None], columns.to(torch.int64)[None, :])
    h = h ^ _BYTES
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")

# The module of Qwen3.5 looks for these as it is imported; without an implementation, a call is an error.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _library.define(f"{_name}(Tensor first) -> Tensor")
