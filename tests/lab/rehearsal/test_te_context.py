"""Transformer Engine's own attention over tokens that are split over ranks, against torch's over whole sequences."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from megasync.lab.rehearsal import te_extension as tex

HEADS, GROUPS = 8, 4
# Lengths, head sizes of keys and of values. None of the first divides into chunks.
CASES = {
    ("thd", "padded"): ((5, 17, 1, 8), 16, 16),
    ("thd", "exact"): ((16, 8, 24), 24, 16),
    ("sbhd", "exact"): ((16, 16), 16, 16),
    ("bshd", "exact"): ((24,), 16, 16),
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Case -> ranks -> file of tensors that are packed with padding to chunks of all ranks, and what torch computes."""
    found = {}
    for case, (lengths, size, value_size) in CASES.items():
        for ranks in (2, 4):
            padded = [-(-length // (2 * ranks)) * 2 * ranks for length in lengths]
            generator = torch.Generator().manual_seed(3)
            shapes = {"q": (HEADS, size), "k": (GROUPS, size), "v": (GROUPS, value_size), "grad": (HEADS, value_size)}
            tensors = {name: torch.randn(sum(padded), *shape, generator=generator) for name, shape in shapes.items()}
            ends = torch.tensor(padded).cumsum(0)
            kept = torch.cat(
                [torch.arange(end - pad, end - pad + n) for end, pad, n in zip(ends, padded, lengths, strict=True)]
            )
            path = tmp_path_factory.mktemp("attention") / "tensors.pt"
            torch.save({**tensors, "lengths": list(lengths)}, path)
            found[case, ranks] = str(path), kept, by_torch(tensors, kept, lengths)
    return found


def by_torch(tensors, kept, lengths):
    """Output and gradients of the tokens ``kept``, each [tokens, heads, dim]."""
    q, k, v = (tensors[name][kept].requires_grad_() for name in ("q", "k", "v"))
    outs = []
    for part in zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True):
        each = [tensor.transpose(0, 1)[None] for tensor in part]
        outs.append(scaled_dot_product_attention(*each, is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(0, 1))
    out = torch.cat(outs)
    out.backward(tensors["grad"][kept])
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize(
    ("ranks", "comms"),
    [(2, ("p2p", "all_gather", "a2a")), pytest.param(4, ("p2p", "all_gather", "a2a"), marks=pytest.mark.matrix)],
)
def test_attention_over_split_tokens_is_torchs_over_whole_sequences(run_ranks, problems, ranks, comms):
    """A ring of keys and values, all of them gathered, or heads exchanged for tokens; packed and of one length."""
    cases = [
        {"tensors": problems[case, ranks][0], "format": case[0], "comm": comm, "dtype": dtype}
        for case in CASES
        for comm in comms
        for dtype in ("float32", "bfloat16")
    ]
    results = run_ranks(attention_parts, ranks, flavour="te", cases=cases)
    names = [case for case in CASES for _ in comms for _ in range(2)]
    for index, (name, options) in enumerate(zip(names, cases, strict=True)):
        _, kept, expected = problems[name, ranks]
        order = torch.cat([rank[index][0] for rank in results]).long()
        for part, whole in enumerate(expected):
            rows = torch.cat([rank[index][1][part] for rank in results]).float()
            found = torch.empty_like(rows)
            found[order] = rows
            tolerance = 1e-4 if options["dtype"] == "float32" else 4e-2
            torch.testing.assert_close(
                found[kept], whole, atol=tolerance, rtol=tolerance, msg=lambda text, at=(options, part): f"{at}: {text}"
            )


@given(chunks=st.lists(st.integers(1, 3), min_size=1, max_size=3), ranks=st.integers(1, 4))
def test_ranks_hold_the_early_and_late_chunks_of_each_sequence(chunks, ranks):
    """For three chunks of ranks, the first rank has chunks 0 and 5, the second 1 and 4, the third 2 and 3."""
    offsets = torch.tensor([0, *chunks]).cumsum(0).int() * 2 * ranks
    tokens = int(offsets[-1])
    values = torch.arange(tokens)[:, None] + torch.tensor([0.0, 0.5])
    parts = [tex.thd_get_partitioned_indices(offsets, tokens, ranks, rank).long() for rank in range(ranks)]
    for rank, part in enumerate(parts):
        own = []
        for start, size in zip((offsets[:-1]).tolist(), chunks, strict=True):
            for chunk in (rank, 2 * ranks - 1 - rank):
                own += range(start + chunk * size, start + (chunk + 1) * size)
        assert part.tolist() == own
        early, late = (tex.thd_read_half_tensor(values[part], offsets // ranks, half) for half in (0, 1))
        assert sorted([*early[:, 0].tolist(), *late[:, 0].tolist()]) == sorted(own)
        assert ranks == 1 or all(a < b for a, b in zip(early[:, 0], late[:, 0], strict=True))
    split = tex.thd_sequence_order_to_cp_rank_order(values, offsets, ranks, tokens)
    assert torch.equal(split, values[torch.cat(parts)])
    assert torch.equal(tex.thd_cp_rank_order_to_sequence_order(split, offsets, ranks, tokens), values)


def test_gradients_of_a_step_change_the_chunks_that_they_belong_to():
    offsets = torch.tensor([0, 2, 6])
    step = torch.arange(1.0, 7.0).view(6, 1, 1)

    def changed(first, second, given):
        grad = torch.full((6, 1, 1), 10.0)
        tex.thd_grad_correction(grad, given, offsets, first, second)
        return grad.flatten().tolist()

    assert changed("add", "copy", step) == [11, 2, 13, 14, 5, 6]
    assert changed("none", "add", step[:3]) == [10, 11, 10, 10, 12, 13]
    assert changed("copy", "zero", step[:3]) == [1, 0, 2, 3, 0, 0]
    with pytest.raises(ValueError, match=r"one of add, copy, none, zero, not \('add', 'double'\)"):
        changed("add", "double", step)


def attention_parts(cases):
    """Per case the tokens of this rank among all, its output and gradients: Transformer Engine's attention whose tokens
    are split over all ranks. Float32 goes past `DotProductAttention`, which has no backend for it then."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import attn_forward_func_with_cp
    from transformer_engine_torch import thd_get_partitioned_indices

    world, rank, stream = dist.get_world_size(), dist.get_rank(), torch.cuda.current_stream()
    members, found = list(range(world)), []
    for case in cases:
        whole = torch.load(case["tensors"])
        lengths, layout = whole["lengths"], case["format"]
        padded = [-(-length // (2 * world)) * 2 * world for length in lengths]
        starts, offsets = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (lengths, padded))
        indices, mask = thd_get_partitioned_indices(offsets, sum(padded), world, rank), "padding_causal"
        dtype = getattr(torch, case["dtype"])
        parts = [whole[name].to(dtype)[indices].contiguous() for name in ("q", "k", "v", "grad")]
        if layout != "thd":
            # Sequences of one length: [batch, length, heads, dim] or [length, batch, heads, dim].
            starts, mask = offsets, "causal"
            parts = [part.view(len(lengths), -1, *part.shape[1:]) for part in parts]
            if layout == "sbhd":
                parts = [part.transpose(0, 1).contiguous() for part in parts]
        q, k, v = (part.requires_grad_() for part in parts[:3])
        packed = {
            "cu_seqlens_q_padded": offsets,
            "cu_seqlens_kv_padded": offsets,
            "pad_between_seqs": padded != lengths,
        }
        if dtype == torch.float32:
            out = attn_forward_func_with_cp(
                True, q, k, v, starts, starts, max(padded), max(padded), offsets, offsets, 0.0,
                dist.group.WORLD, members, stream, case["comm"], 0.3, layout, mask,
                use_fused_attention=True, window_size=(-1, 0), pad_between_seqs=packed["pad_between_seqs"],
            )  # fmt: skip
        else:
            attention = te.DotProductAttention(
                q.shape[-2], (q.shape[-1], v.shape[-1]), k.shape[-2], qkv_format=layout, attn_mask_type=mask,
                softmax_scale=0.3, cp_group=dist.group.WORLD, cp_global_ranks=members, cp_stream=stream,
                cp_comm_type=case["comm"], attention_dropout=0.0,
            )  # fmt: skip
            lengths_of = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": max(padded)}
            lengths_of["max_seqlen_kv"] = max(padded)
            out = attention(q, k, v, **(lengths_of | packed if layout == "thd" else {}))
        out = out.view(*q.shape[:-1], v.shape[-1])
        out.backward(parts[3])
        rows = [out.detach(), q.grad, k.grad, v.grad]
        if layout == "sbhd":
            rows = [row.transpose(0, 1) for row in rows]
        found.append((indices, [row.reshape(-1, *row.shape[-2:]) for row in rows]))
    return found
