"""Weights between Megatron, Hugging Face and SGLang: layout, plan, and the transports that publish a version.

Layout, plan and topology are pure; a `..._sender` or `disk_writer` runs on the trainer ranks, a `..._sync` in the driver.
"""
