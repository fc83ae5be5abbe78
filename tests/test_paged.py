"""Attention over a paged cache equals the fp64 oracle, request by request.

Everything that a request does not own is poison: unused pages, page tails, the slots of new tokens
that prefills take from the activations, the activations of decodes, which read the cache, and the
block ids past a length. Case numbers are those of the project's list of public bug reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native import either_backend, one_thread
from torch import Tensor

import mla_ops
from mla_ops import MLADims, MLAMetadata, build_metadata, reference, reorder_batch

pytestmark = [either_backend, one_thread]

DIMS = MLADims(3, 20, 10, 6, 14)  # 31 new tokens and more are expanded
SCALE = 0.37  # not 1 / sqrt(P + R)
GARBAGE = 10**8
NAN, INF = float("nan"), float("inf")
FP8 = torch.float8_e4m3fn
# Decodes; then a prompt, a long and three short extends, and a request without new tokens.
QUERY_LENS = [1, 1, 1, 4, 40, 2, 7, 1, 0]
CONTEXTS = [9, 64, 1, 0, 33, 70, 16, 0, 5]


@dataclass
class Batch:
    """The arguments of `mla_paged_attention`, and the rows that each request attends to."""

    query: Tensor
    kv_c: Tensor
    k_pe: Tensor
    w_kv_b: Tensor
    kv_cache: Tensor
    metadata: MLAMetadata
    kv_scale: Tensor | None
    rows: list[Tensor]

    def attend(self) -> mla_ops.MLAOutput:
        return mla_ops.mla_paged_attention(
            self.query,
            self.kv_c,
            self.k_pe,
            self.w_kv_b,
            self.kv_cache,
            self.metadata,
            softmax_scale=SCALE,
            kv_scale=self.kv_scale,
        )

    def expected(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """What the oracle says, computed in `dtype`; padding is 0 and -inf."""
        tokens, heads, _ = self.query.shape
        rank = self.w_kv_b.shape[1]
        nope = self.query.shape[2] - (self.kv_cache.shape[2] - rank)
        out = torch.zeros(tokens, heads, self.w_kv_b.shape[0] // heads - nope, dtype=dtype)
        lse = torch.full((heads, tokens), -INF, dtype=reference.stat_dtype(dtype))
        spans = pairwise(self.metadata.cu_seqlens_q.tolist())
        for (begin, end), rows in zip(spans, self.rows, strict=True):
            result = reference.mla_attention(
                self.query[begin:end].transpose(0, 1)[None].to(dtype),
                rows[None, :, :rank].to(dtype),
                rows[None, :, rank:].to(dtype),
                self.w_kv_b.to(dtype),
                softmax_scale=SCALE,
                is_causal=True,
            )
            out[begin:end] = result.out[0].transpose(0, 1)
            lse[:, begin:end] = result.lse[0]
        return out, lse

    def check(self, result: tuple[Tensor, Tensor] | None = None) -> None:
        """Compare with the oracle, within twice the error of an ordinary implementation."""
        dtype = self.query.dtype
        for ours, exact, ordinary in zip(
            self.attend() if result is None else result,
            self.expected(),
            self.expected(dtype),
            strict=True,
        ):
            assert ours.shape == exact.shape
            assert ours.dtype == ordinary.dtype
            assert ours.is_contiguous()
            error = torch.where(exact.isfinite(), ordinary.double() - exact, 0.0).abs()
            budget = 2 * error.amax().item() if error.numel() else 0.0
            step = {torch.float64: 1e-12}.get(dtype, max(1e-5, torch.finfo(ours.dtype).eps))
            torch.testing.assert_close(ours.double(), exact, atol=budget + step, rtol=step)


def as_bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def make_batch(
    query_lens=QUERY_LENS,
    contexts=CONTEXTS,
    *,
    dims=DIMS,
    dtype=torch.float64,
    cache_dtype=None,
    kv_scale=None,
    block_size=3,
    pages="scattered",
    workspace_tokens=5,
    threshold=1,
    pad_to=None,
    padding=0,
    junk=NAN,
    seed=0,
):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    if cache_dtype is None:
        cache_dtype = torch.float32 if dtype == torch.float64 else dtype
    seq_lens = [new + old for new, old in zip(query_lens, contexts, strict=True)]
    needed = [-(-length // block_size) for length in seq_lens]
    total = sum(needed) + 3
    ids = {
        "scattered": torch.randperm(total, generator=generator),
        "descending": torch.arange(total).flip(0),
        "consecutive": torch.arange(total),
    }[pages]
    table = torch.full((len(needed), max(needed, default=0) + 2), GARBAGE, dtype=torch.int32)
    for i, count in enumerate(needed):
        table[i, :count] = ids[sum(needed[:i]) :][:count]
    metadata = build_metadata(
        query_lens,
        seq_lens,
        table,
        block_size=block_size,
        workspace_tokens=workspace_tokens,
        decode_threshold=threshold,
        pad_to=pad_to,
    )
    tokens = metadata.num_tokens + padding
    kv_cache = torch.full((total, block_size, dims.latent_dim), junk).to(cache_dtype)
    new = torch.full((tokens, dims.latent_dim), NAN, dtype=dtype)
    query = torch.full((tokens, dims.num_heads, dims.qk_head_dim), NAN, dtype=dtype)
    query[: sum(query_lens)] = randn(sum(query_lens), *query.shape[1:]).to(dtype)
    scale = 1.0 if kv_scale is None or cache_dtype != FP8 else float(kv_scale)
    seen = []
    for i, (count, old, length) in enumerate(zip(query_lens, contexts, seq_lens, strict=True)):
        given_rows = randn(length, dims.latent_dim).to(dtype)
        stored = (given_rows / scale).to(cache_dtype)
        is_decode = i < metadata.num_decodes
        cached = torch.arange(length if is_decode else old)
        where = (table[i].long()[cached // block_size], cached % block_size)
        as_bytes(kv_cache)[where] = as_bytes(stored[cached])
        if not is_decode:
            first = sum(query_lens[:i])
            new[first : first + count] = given_rows[old:]
        exact = stored.double() * scale
        seen.append(torch.cat([exact[cached], given_rows[len(cached) :].double()]))
    seen += [torch.zeros(0, dims.latent_dim)] * (metadata.num_reqs - len(seen))
    weight = (randn(dims.expanded_dim, dims.kv_lora_rank) * dims.kv_lora_rank**-0.5).to(dtype)
    kv_c, k_pe = new.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=1)
    return Batch(query, kv_c, k_pe, weight, kv_cache, metadata, kv_scale, seen)


# --- any batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workspace_tokens", [1, 2, 7, 65_536])
@pytest.mark.parametrize("pages", ["scattered", "descending", "consecutive"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_a_mixed_batch(block_size, pages, workspace_tokens):
    """Cases 27 and 28: scattered pages, and block sizes other than 64."""
    make_batch(block_size=block_size, pages=pages, workspace_tokens=workspace_tokens).check()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 4) | st.integers(0, 45), st.integers(0, 40)), max_size=5),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 3),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_any_batch(requests, block_size, workspace_tokens, threshold, padding, random):
    query_lens = [new for new, _ in requests]
    seq_lens = [new + old for new, old in requests]
    order = reorder_batch(query_lens, seq_lens, decode_threshold=threshold).permutation
    make_batch(
        [requests[i][0] for i in order],
        [requests[i][1] for i in order],
        block_size=block_size,
        workspace_tokens=workspace_tokens,
        threshold=threshold,
        padding=padding,
        seed=random.randrange(1000),
    ).check()


@pytest.mark.parametrize("cache", ["same", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_dtype(dtype, cache):
    options = {} if cache == "same" else {"cache_dtype": FP8, "kv_scale": torch.tensor(0.03)}
    make_batch(dtype=dtype, **options).check()


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_that_a_kernel_can_read_where_they_lie(dtype, block_size):
    options = {"threshold": 2, "workspace_tokens": 1024, "block_size": block_size}
    make_batch([2, 1, 1, 1], [126, 127, 159, 140], dtype=dtype, seed=1, **options).check()


@pytest.mark.parametrize("heads", [1, 3, 4, 12, 16, 20, 66, 128])
def test_head_counts(heads):
    """Case 32: head counts that are no multiple of a tile."""
    dims = replace(DIMS, num_heads=heads)
    make_batch([3, 3, 5, 33], [7, 20, 6, 9], dims=dims, threshold=3).check()


@pytest.mark.parametrize(
    "dims",
    [
        MLADims(4, 32, 16, 8, 16),
        MLADims(2, 48, 128, 64, 128),
        MLADims(2, 48, 192, 64, 256),
        MLADims(5, 24, 10, 0, 14),
        MLADims(1, 24, 0, 10, 9),
        MLADims(7, 16, 6, 4, 30),
    ],
    ids=str,
)
@pytest.mark.parametrize("context", [0, 16, 40])
def test_widths(dims, context):
    """Case 13: values narrower, wider and as wide as keys, with no, one and three chunks."""
    batch = make_batch([1, 5, 33], [9, context, 0], dims=dims, workspace_tokens=16)
    assert batch.metadata.num_chunks == -(-context // 16)
    batch.check()


@pytest.mark.parametrize(
    ("contexts", "workspace_tokens"),
    [([20] * 5, 64), ([60, 1, 1, 1], 64), ([0, 40], 16), ([40, 3, 0, 25], 8), ([16] * 3, 16)],
)
def test_chunk_plans(contexts, workspace_tokens):
    """Cases 3, 8 and 15: chunks in which some requests have no rows."""
    query_lens = [6] * len(contexts)
    order = sorted(range(len(contexts)), key=lambda i: contexts[i] == 0)
    for chosen in (order, order[::-1]):
        make_batch(
            query_lens,
            [contexts[i] for i in chosen],
            block_size=16,
            workspace_tokens=workspace_tokens,
        ).check()


@pytest.mark.parametrize("new", [1, 257])
@pytest.mark.parametrize("context", [2047, 2048, 4096, 4097])
def test_sizes_around_those_of_tiles(new, context):
    """Case 24: right at every internal cap and behind it."""
    dims = MLADims(1, 20, 10, 6, 14)
    make_batch([new], [context], dims=dims, block_size=16, workspace_tokens=65_536).check()


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 128])
def test_more_than_64_pages(block_size):
    """Case 28: a loop over tokens whose body took pages."""
    context = 65 * block_size + block_size // 2
    make_batch([1, 2], [context, context], block_size=block_size, workspace_tokens=1000).check()


# --- who sees what -------------------------------------------------------------------------------


def one_hot(batch: Batch) -> Batch:
    """Give key `i` the one-hot value `i` and all keys the same score."""
    rank, heads = batch.w_kv_b.shape[1], batch.query.shape[1]
    eye = torch.eye(rank, batch.kv_cache.shape[2], dtype=batch.query.dtype)
    batch.rows = [eye[: len(rows)] for rows in batch.rows]
    batch.kv_cache.zero_()
    table, block_size = batch.metadata.block_table, batch.metadata.block_size
    for i, rows in enumerate(batch.rows):
        for position, row in enumerate(rows):
            batch.kv_cache[table[i, position // block_size], position % block_size] = row
    weight = torch.zeros(heads, 2 * rank, rank, dtype=batch.query.dtype)
    weight[:, rank:] = torch.eye(rank)
    batch.w_kv_b = weight.flatten(0, 1)
    batch.query = torch.ones(batch.query.shape[0], heads, rank, dtype=batch.query.dtype)
    return batch


@pytest.mark.parametrize("threshold", [1, 2])
def test_causal_is_aligned_to_the_last_key(threshold):
    """Case 17: two queries, five keys; uniform scores give exact averages."""
    batch = one_hot(make_batch([2], [3], dims=MLADims(2, 6, 3, 0, 6), threshold=threshold))
    batch.kv_c, batch.k_pe = batch.rows[0][3:], batch.rows[0][3:, 6:]
    out, lse = batch.attend()
    expected = torch.tensor([[1 / 4] * 4 + [0, 0], [1 / 5] * 5 + [0]], dtype=torch.float64)
    torch.testing.assert_close(out, expected[:, None].expand(2, 2, 6), atol=1e-15, rtol=0)
    torch.testing.assert_close(lse.exp(), torch.tensor([[4.0, 5.0]] * 2).double())


def test_each_request_gets_its_own_values():
    """Case 21: ported code sliced prefills first; every value is the number of its request."""
    batch = make_batch([1, 1, 5], [6, 7, 4])
    cu = batch.metadata.cu_seqlens_q.tolist()
    for i, rows in enumerate(batch.rows):
        table, rows[:] = batch.metadata.block_table[i], i + 1
        batch.kv_cache[table[: -(-len(rows) // 3)].long()] = i + 1
        batch.kv_c[cu[i] : cu[i + 1]] = batch.k_pe[cu[i] : cu[i + 1]] = i + 1
    out, _ = batch.attend()
    unit = batch.w_kv_b.unflatten(0, (3, -1))[:, DIMS.qk_nope_head_dim :].sum(-1)
    ids = torch.tensor([1, 2, 3, 3, 3, 3, 3], dtype=out.dtype)
    torch.testing.assert_close(out, ids[:, None, None] * unit, atol=1e-12, rtol=0)


@pytest.mark.parametrize("lens", [[5 + 3, 9 + 3], [1, 0, 12, 2, 3]])
def test_decodes_of_several_tokens(lens):
    """Case 23: row i sees context + i + 1 keys; short and zero-length requests are padding."""
    batch = make_batch([3] * len(lens), [9] * len(lens), threshold=3)
    batch.rows = [rows[:length] for rows, length in zip(batch.rows, lens, strict=True)]
    lens = torch.tensor(lens, dtype=torch.int32)
    table = batch.metadata.block_table
    batch.check(decode(batch, table, lens))


def decode(batch: Batch, table: Tensor, lens: Tensor, **options) -> mla_ops.MLAOutput:
    return mla_ops.mla_decode(
        batch.query,
        batch.w_kv_b,
        batch.kv_cache,
        table,
        lens,
        **({"softmax_scale": SCALE, "kv_scale": batch.kv_scale} | options),
    )


@pytest.mark.parametrize("padding", [0, 2])
def test_the_two_halves_are_the_slices_of_the_whole(padding):
    batch = make_batch([3, 3, 1, 40, 6], [9, 40, 8, 12, 0], threshold=3, padding=padding)
    meta = batch.metadata
    first, tokens = meta.num_decodes, meta.num_decode_tokens
    front = replace(batch, query=batch.query[:tokens])
    decoded = decode(front, meta.block_table[:first], meta.seq_lens[:first])
    prefilled = mla_ops.mla_chunked_prefill(
        batch.query[tokens:],
        batch.kv_c[tokens:],
        batch.k_pe[tokens:],
        batch.w_kv_b,
        batch.kv_cache,
        meta,
        softmax_scale=SCALE,
    )
    assert (first, tokens) == (2, 6)
    lse = torch.cat([decoded.lse, prefilled.lse], dim=1)
    batch.check((torch.cat([decoded.out, prefilled.out]), lse))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_alone_and_in_a_batch(dtype):
    """Cases 8 and 30: a request's result does not depend on its company."""
    batch = make_batch(dtype=dtype)
    out, lse = batch.attend()
    cu, meta = batch.metadata.cu_seqlens_q.tolist(), batch.metadata
    for i, (begin, end) in enumerate(pairwise(cu)):
        alone = build_metadata(
            [end - begin],
            [int(meta.seq_lens[i])],
            meta.block_table[i : i + 1],
            block_size=meta.block_size,
            workspace_tokens=meta.workspace_tokens,
        )
        mine = {name: getattr(batch, name)[begin:end] for name in ("query", "kv_c", "k_pe")}
        single = replace(batch, **mine, metadata=alone).attend()
        tolerance = {"atol": 1e-12 if dtype == torch.float64 else 2e-6, "rtol": 0}
        torch.testing.assert_close(single.out, out[begin:end], **tolerance)
        torch.testing.assert_close(single.lse, lse[:, begin:end], **tolerance)


def test_requests_that_share_a_prefix_page():
    """Case 27: two requests whose tables begin with the same page."""
    batch = make_batch([1, 4], [6, 5], workspace_tokens=2)
    table = batch.metadata.block_table
    table[1, 0] = table[0, 0]
    batch.rows[1][:3] = batch.rows[0][:3]
    batch.check()


# --- a scheduler's loop --------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 3, 16, 64, 1024])
def test_every_token_budget_gives_the_same_result(budget):
    """Cases 1, 2, 19 and 25: prompts that a budget cuts, mixed with decodes, step by step."""
    block_size, prompts, arrivals, decodes = 4, [37, 5, 80], [0, 2, 3], 6
    total = [prompt + decodes for prompt in prompts]
    whole = make_batch(total, [0, 0, 0], block_size=block_size)
    table = whole.metadata.block_table
    cache = torch.full(whole.kv_cache.shape, NAN)
    starts = whole.metadata.cu_seqlens_q.tolist()
    out, lse = (torch.full(t.shape, NAN, dtype=t.dtype) for t in whole.expected())
    done, step = [0, 0, 0], 0
    while done != total:
        left, new = budget, {}
        # Running decodes first, as schedulers do, then prompts in order of arrival.
        ready = [i for i in range(3) if arrivals[i] <= step and done[i] < total[i]]
        for i in sorted(ready, key=lambda i: done[i] < prompts[i]):
            wanted = prompts[i] - done[i] if done[i] < prompts[i] else 1
            if min(wanted, left):
                new[i] = min(wanted, left)
                left -= new[i]
        step += 1
        if not new:
            continue
        ids = list(new)
        lens, seqs = [new[i] for i in ids], [done[i] + new[i] for i in ids]
        permutation = reorder_batch(lens, seqs).permutation
        ids = [ids[j] for j in permutation]
        metadata = build_metadata(
            [lens[j] for j in permutation],
            [seqs[j] for j in permutation],
            table[ids],
            block_size=block_size,
            workspace_tokens=16,
        )
        rows = torch.cat([torch.arange(done[i], done[i] + new[i]) + starts[i] for i in ids])
        kv_c, k_pe = whole.kv_c[rows], whole.k_pe[rows]
        mla_ops.update_kv_cache(kv_c, k_pe, cache, metadata.slot_mapping)
        step_args = {"query": whole.query[rows], "kv_c": kv_c, "k_pe": k_pe}
        part = replace(whole, **step_args, kv_cache=cache, metadata=metadata)
        out[rows], lse[:, rows] = part.attend()
        for i in ids:
            done[i] += new[i]
    whole.check((out, lse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_smaller_chunks_are_no_less_accurate(dtype):
    """Case 2: an error that grows as chunks shrink is the mark of a faulty merge."""
    dims, errors = MLADims(2, 512, 128, 64, 128), []
    for workspace_tokens in (300, 64, 17, 1):
        batch = make_batch(
            [20], [280], dims=dims, dtype=dtype, workspace_tokens=workspace_tokens, block_size=16
        )
        exact = batch.expected()[0]
        errors.append(float((batch.attend().out.double() - exact).abs().max() / exact.abs().max()))
    assert max(errors) <= max(1.5 * errors[0], 2e-5)


# --- poison, padding, nothing --------------------------------------------------------------------


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_what_no_request_owns_may_be_anything(junk):
    """Case 29: five of sixteen slots are written; masking the weight leaves 0 * NaN."""
    batch = make_batch([1, 1, 2], [4, 20, 3], block_size=16, junk=junk)
    assert batch.kv_cache.isfinite().logical_not().any()
    batch.check()


@pytest.mark.parametrize("query_len", [1, 3])
def test_padding_of_a_captured_batch(query_len):
    """Cases 16 and 79: requests without keys are 0 and -inf, their queries NaN."""
    batch = make_batch([query_len] * 2, [7, 12], threshold=query_len, pad_to=5, padding=1)
    batch.check()
    batch.query = batch.query[:-1]
    batch.check(decode(batch, batch.metadata.block_table, batch.metadata.seq_lens))


@pytest.mark.parametrize(
    ("query_lens", "contexts", "padding"),
    [([], [], 0), ([], [], 3), ([0, 0], [5, 0], 0), ([1], [4], 0), ([3], [0], 0), ([0], [9], 2)],
)
def test_no_tokens_no_decodes_no_prefills(query_lens, contexts, padding):
    batch = make_batch(query_lens, contexts, padding=padding)
    batch.check()
    results = {t.untyped_storage().data_ptr() for t in batch.attend() if t.numel()}
    inputs = (batch.query, batch.kv_c, batch.w_kv_b, batch.kv_cache)
    assert not results & {t.untyped_storage().data_ptr() for t in inputs}  # case 48


def test_inputs_need_not_be_contiguous():
    """Case 31: slices of wider tensors, transposed queries and weights."""
    batch = make_batch()
    plain = batch.attend()
    assert batch.kv_c.stride() == (DIMS.latent_dim, 1)
    batch.query = batch.query.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    batch.kv_c, batch.k_pe = (t.t().contiguous().t() for t in (batch.kv_c, batch.k_pe))
    batch.w_kv_b = batch.w_kv_b.t().contiguous().t()
    for ours, expected in zip(batch.attend(), plain, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)
    batch.check()
