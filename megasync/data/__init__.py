"""Prompts: loads datasets as rows, renders rows to token ids, and serves them through a resumable cursor.

A row is a dict with a "prompt" column (text, or a list of chat messages), usually an "answer" column, and any other
columns that the reward function reads.
"""

from megasync.data.datasets import Reward, load_dataset, load_training_sets
from megasync.data.prompts import PromptSource, Renderer, render_rows, split_examples
from megasync.data.rows import as_rows

__all__ = [
    "PromptSource",
    "Renderer",
    "Reward",
    "as_rows",
    "load_dataset",
    "load_training_sets",
    "render_rows",
    "split_examples",
]
