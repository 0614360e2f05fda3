"""Rehearses a GPU run on a machine without GPUs: real Megatron and Transformer Engine Python over stand-ins.

What a rehearsal computes is correct, but says nothing of the speed, the memory or the rounding of GPU kernels.
"""
