"""Weights between Megatron, Hugging Face and SGLang: layout, plan, broadcast, and the transaction that publishes a version.

Layout, plan and topology are pure; `broadcast` runs on the trainer ranks, `transaction` in the driver.
"""
