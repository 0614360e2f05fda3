"""Random experts for rows, and Hugging Face's results with them."""

from unittest import mock

import numpy as np
import torch
from family_layouts import reference

from megasync.layout.model_files import read_hf_config
from megasync.layout.routes import RouteFormat


def routed(rows, path):
    """The rows with random experts for all positions but the last. Rows with one prompt have the same in it."""
    form, generator, prompts = RouteFormat.of(read_hf_config(path)), np.random.default_rng(3), {}

    def routes(count):
        scores = generator.random((count, len(form.sparse), form.experts))
        return scores.argsort(axis=-1)[..., : form.per_token].tolist()

    found = []
    for row in rows:
        of_prompt = prompts.setdefault(tuple(row["prompt"]), routes(len(row["prompt"])))
        found.append({**row, "routes": [*of_prompt, *routes(len(row["response"]) - 1)]})
    return found


def replayed_reference(path, rows):
    """`reference` with the experts of the rows: the choice of ``experts`` among all of them is replaced."""
    form = RouteFormat.of(read_hf_config(path))
    choose = torch.topk
    # Layer by layer for each row. Hugging Face also feeds the last token, whose experts do not matter.
    calls = (
        torch.tensor([*(position[layer] for position in row["routes"]), range(form.per_token)])
        for row in rows
        for layer in range(len(form.sparse))
    )

    def topk(values, k, *arguments, **options):
        if values.shape[-1] != form.experts or k != form.per_token:
            return choose(values, k, *arguments, **options)
        experts = next(calls)
        return torch.return_types.topk((values.gather(-1, experts), experts))

    with mock.patch("torch.topk", topk):
        found = reference(path, rows)
    assert next(calls, None) is None
    return found
