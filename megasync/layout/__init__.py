"""Megatron shards, Hugging Face tensors and engine parameters as rectangles of each other.

`families` has one table per model family; `topology` says which rank holds which part; `shards` reads and writes
safetensors; `trace` learns an engine's layout from its own loader. Nothing here sends anything.
"""
