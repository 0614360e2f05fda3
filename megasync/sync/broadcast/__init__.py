"""The broadcast transport: whole tensors in flattened buckets, over stock SGLang endpoints."""
