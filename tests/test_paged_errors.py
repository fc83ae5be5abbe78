"""Bad arguments of the paged and ragged ops get an error that says what was expected and what came.

Rules on ranks, sizes, dtypes and devices hold for fake tensors too, as they do under
`torch.compile`; rules on values hold where values can be read without a sync, on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from native import either_backend
from torch import Tensor

import mla_ops
from mla_ops import (
    InvalidInputError,
    UnsupportedInputError,
    build_metadata,
    dispatch,
    validation_paged,
)

pytestmark = either_backend

HEADS, RANK, NOPE, ROPE, VALUE, BLOCK = 3, 20, 10, 6, 14, 4
WIDTH = RANK + ROPE
FP8 = torch.float8_e4m3fn


def randn(*shape, **options):
    return torch.randn(shape, **options)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def arguments(function):
    """Arguments that fit, by name."""
    query, weight = randn(4, HEADS, NOPE + ROPE), randn(HEADS * (NOPE + VALUE), RANK)
    cache = randn(6, BLOCK, WIDTH)
    new = {"kv_c": randn(4, RANK), "k_pe": randn(4, ROPE)}
    table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    paged = {"softmax_scale": 0.3, "kv_scale": None}
    if function == "update_kv_cache":
        slots = torch.tensor([3, -1, 0, 23])
        return new | {"kv_cache": cache, "slot_mapping": slots, "kv_scale": None}
    if function == "gather_kv_cache":
        place = {"cu_seqlens_k": ints(0, 5, 8), "seq_starts": ints(1, 0)}
        arrays = {"kv_cache": cache, "block_table": table} | place
        return arrays | {"workspace": torch.zeros(9, WIDTH), "kv_scale": None}
    if function == "mla_decode":
        arrays = {"kv_cache": cache, "block_table": table, "seq_lens": ints(5, 8)}
        return {"query": query, "w_kv_b": weight} | arrays | paged
    if function == "mla_prefill":
        keys = {"k_nope": randn(7, HEADS, NOPE), "k_pe": randn(7, ROPE)}
        spans = {"cu_seqlens_q": ints(0, 1, 4), "cu_seqlens_k": ints(0, 4, 7)}
        options = {"max_seqlen_q": 3, "max_seqlen_k": 4, "softmax_scale": 0.3, "is_causal": True}
        return {"query": query} | keys | {"value": randn(7, HEADS, VALUE)} | spans | options
    if function == "merge_attn_states":
        out, lse = randn(4, HEADS, VALUE), randn(HEADS, 4)
        prefix = {"prefix_out": out, "prefix_lse": lse}
        suffix = {"suffix_out": out + 1, "suffix_lse": lse + 1}
        return prefix | suffix | {"out": None}
    decodes = 1 if function == "mla_paged_attention" else 0
    metadata = build_metadata(
        [1, 3],
        [5, 8],
        table,
        block_size=BLOCK,
        workspace_tokens=3,
        is_prefilling=[not decodes, True],
    )
    arrays = {"w_kv_b": weight, "kv_cache": cache, "metadata": metadata}
    return {"query": query} | new | arrays | paged


FUNCTIONS = [
    "update_kv_cache",
    "gather_kv_cache",
    "mla_prefill",
    "merge_attn_states",
    "mla_decode",
    "mla_chunked_prefill",
    "mla_paged_attention",
]


def call(function, changes, fake=False):
    given = arguments(function) | changes
    if not fake:
        return getattr(mla_ops, function)(**given)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in given.items()}
        return getattr(mla_ops, function)(**given)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_arguments_fit_as_they_are(function, fake):
    call(function, {}, fake)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_call_that_was_checked_is_not_checked_again(function, monkeypatch):
    call(function, {})
    monkeypatch.setattr(validation_paged, "check_rank", lambda *args: pytest.fail("checked again"))
    call(function, {})


SCALE = {"softmax_scale": float("nan")}, "softmax_scale must be a finite float, got nan"
QUERY = [
    (
        {"query": randn(4, 16)},
        r"query must be \[T, H, P\+R\] \(3 dimensions\), got shape \(4, 16\)",
    ),
    ({"query": randn(4, 3, 16).to(FP8)}, "query must be one of torch.bfloat16.*, got torch.float8"),
    ({"query": torch.ones(4, 3, 16).int()}, "query must be one of .*float64, got torch.int32"),
    (SCALE[0], SCALE[1]),
]
KV_SCALE = [
    ({"kv_scale": torch.ones(2)}, r"kv_scale must be one floating-point element, got .*\[2\]"),
    ({"kv_scale": torch.tensor(1)}, "kv_scale must be one floating-point element, got torch.int64"),
    ({"kv_scale": torch.ones(1, device="meta")}, "kv_scale must be on the .* device cpu"),
]
CACHE = [
    *KV_SCALE,
    ({"kv_cache": randn(6, WIDTH)}, r"kv_cache must be \[num_blocks, block_size, L\+R\]"),
    ({"kv_cache": randn(6, BLOCK, WIDTH).double()}, "kv_cache must be one of .*float8_e4m3fn, got"),
    ({"kv_cache": randn(6, 0, WIDTH)}, "kv_cache must be of block_size at least 1"),
]
PAGED = [
    *QUERY,
    *CACHE,
    ({"kv_cache": randn(6, BLOCK, 19)}, r"kv_cache must be L\+R wide with w_kv_b's L = 20"),
    ({"kv_cache": randn(6, BLOCK, 37)}, r"kv_cache must be L\+R wide .* at most 16, got shape"),
    ({"kv_cache": randn(6, BLOCK, WIDTH, device="meta")}, "kv_cache must be on the query's device"),
    ({"w_kv_b": randn(72)}, r"w_kv_b must be \[H\*\(P\+V\), L\] \(2 dimensions\)"),
    ({"w_kv_b": randn(73, RANK)}, r"w_kv_b must be .* with H = 3, P = 10 and V >= 1, got shape"),
    ({"w_kv_b": randn(30, RANK)}, r"w_kv_b must be .* V >= 1, got shape \(30, 20\)"),
    ({"w_kv_b": randn(72, RANK).double()}, "w_kv_b must be of the query's dtype torch.float32"),
    ({"w_kv_b": randn(72, RANK, device="meta")}, "w_kv_b must be on the query's device cpu"),
    ({"query": randn(4, 0, 16)}, r"w_kv_b must be .* with H = 0"),
]
NEW = [
    ({"kv_c": randn(5, RANK)}, r"kv_c must be \[T, 20\] with T = 4, got shape \(5, 20\)"),
    ({"kv_c": randn(4, RANK).bfloat16()}, "kv_c must be of the query's dtype torch.float32"),
    ({"kv_c": randn(4, RANK, device="meta")}, "kv_c must be on the query's device cpu"),
    ({"k_pe": randn(4, 5)}, r"k_pe must be \[T, 6\] with T = 4, got shape \(4, 5\)"),
]
OUTS = [
    ({name: randn(4, HEADS, 5)}, rf"{name} must be shape \(4, 3, 14\), got shape \(4, 3, 5\)")
    for name in ("suffix_out", "out")
]
LSES = [
    ({name: value}, rf"{name} must be \[H, T\] = \(3, 4\), fp32")
    for name in ("prefix_lse", "suffix_lse")
    for value in (randn(4, HEADS), randn(HEADS, 4).half())
]
SPANS = [
    ({"cu_seqlens_q": ints(0, 1, 4).long()}, "cu_seqlens_q must be int32, got torch.int64"),
    ({"cu_seqlens_q": ints(0, 4)[None]}, r"cu_seqlens_q must be \[num_reqs \+ 1\]"),
    ({"cu_seqlens_q": ints()}, r"cu_seqlens_q must be \[num_reqs \+ 1\], got shape \(0,\)"),
    ({"cu_seqlens_k": ints(0, 4)}, r"cu_seqlens_k must be .* = \(3\), got shape \(2,\)"),
    ({"max_seqlen_q": -1}, "max_seqlen_q and max_seqlen_k must be at least 0, got -1, 4"),
    ({"max_seqlen_k": -2}, "max_seqlen_q and max_seqlen_k must be at least 0, got 3, -2"),
]
REFUSALS = {
    "update_kv_cache": [
        *CACHE,
        ({"kv_c": randn(4, 1, RANK)}, r"kv_c must be \[T, L\] \(2 dimensions\)"),
        ({"k_pe": randn(4)}, r"k_pe must be \[T, R\] \(2 dimensions\)"),
        ({"kv_c": torch.ones(4, RANK).int()}, "kv_c must be one of"),
        ({"k_pe": randn(4, ROPE).half()}, r"k_pe must be \[T = 4, R\] of torch.float32, as kv_c"),
        ({"k_pe": randn(3, ROPE)}, r"k_pe must be \[T = 4, R\]"),
        ({"k_pe": randn(4, 5)}, r"kv_cache must be \[num_blocks, block_size, L\+R = 25\], got"),
        ({"slot_mapping": ints(1, 2, 3, 4)}, "slot_mapping must be int64, got torch.int32"),
        ({"slot_mapping": torch.arange(3)}, r"slot_mapping must be \[T\] = \(4,\), got shape"),
        ({"slot_mapping": torch.arange(4, device="meta")}, "slot_mapping must be on kv_c's device"),
        ({"kv_cache": randn(6, BLOCK, WIDTH, device="meta")}, "kv_cache must be on kv_c's device"),
    ],
    "gather_kv_cache": [
        *CACHE,
        ({"block_table": ints(3, 1)}, r"block_table must be \[num_reqs, max_blocks\]"),
        ({"block_table": torch.zeros(2, 2).long()}, "block_table must be int32, got torch.int64"),
        ({"cu_seqlens_k": ints(0, 5)}, r"cu_seqlens_k must be \[num_reqs \+ 1\] = \(3\), got"),
        ({"seq_starts": ints(0)}, r"seq_starts must be \[num_reqs\] = \(2\), got shape \(1,\)"),
        ({"workspace": randn(9)}, r"workspace must be \[rows, L\+R\] \(2 dimensions\)"),
        ({"workspace": randn(9, 25)}, r"workspace must be \[rows, L\+R = 26\], floating point"),
        ({"workspace": torch.zeros(9, WIDTH).int()}, "workspace must be .* got torch.int32"),
        ({"workspace": randn(9, WIDTH).to(FP8)}, "workspace must be .* got torch.float8_e4m3fn"),
        ({"workspace": randn(9, WIDTH, device="meta")}, "workspace must be on the cache's device"),
        ({"block_table": torch.zeros(2, 2, device="meta").int()}, "block_table must be on the"),
        ({"seq_starts": torch.zeros(2, device="meta").int()}, "seq_starts must be on the"),
        ({"cu_seqlens_k": torch.zeros(3, device="meta").int()}, "cu_seqlens_k must be on the"),
    ],
    "mla_prefill": [
        *QUERY,
        *SPANS,
        ({"k_nope": randn(7, 10)}, r"k_nope must be \[K, H, P\] \(3 dimensions\)"),
        ({"k_pe": randn(7, 1, ROPE)}, r"k_pe must be \[K, R\] \(2 dimensions\)"),
        ({"value": randn(7, 14)}, r"value must be \[K, H, V\] \(3 dimensions\)"),
        ({"k_nope": randn(7, HEADS, NOPE).half()}, "k_nope must be of the query's dtype"),
        ({"value": randn(7, HEADS, VALUE, device="meta")}, "value must be on the query's device"),
        (
            {"k_nope": randn(6, HEADS, NOPE)},
            "k_nope, k_pe and value must be of K = 7 keys and H = 3",
        ),
        ({"k_pe": randn(6, ROPE)}, "k_nope, k_pe and value must be of K = 7 keys and H = 3 heads"),
        ({"value": randn(7, 2, VALUE)}, "k_nope, k_pe and value must be of K = 7 keys and H = 3"),
        ({"k_pe": randn(7, 5)}, r"P \+ R must be the query's width 16, got 10 \+ 5"),
        ({"value": randn(7, HEADS, 0)}, "query and value must be of .* V >= 1, got"),
        ({"cu_seqlens_q": torch.zeros(3, device="meta").int()}, "cu_seqlens_q must be on the"),
    ],
    "merge_attn_states": [
        *OUTS,
        *LSES,
        ({"prefix_out": randn(4, 42)}, r"prefix_out must be \[T, H, V\] \(3 dimensions\)"),
        ({"prefix_out": torch.ones(4, 3, 14).int()}, "prefix_out must be one of"),
        ({"suffix_out": torch.ones(4, 3, 14).int()}, "suffix_out must be floating point, got"),
        ({"out": torch.ones(4, 3, 14).int()}, "out must be floating point, got torch.int32"),
        ({"suffix_out": randn(4, 3, 14, device="meta")}, "suffix_out must be on the"),
        ({"suffix_lse": randn(3, 4, device="meta")}, "suffix_lse must be on the"),
    ],
    "mla_decode": [
        *PAGED,
        ({"block_table": ints(3, 1)}, r"block_table must be \[num_reqs, max_blocks\]"),
        ({"block_table": torch.zeros(2, 2).long()}, "block_table must be int32"),
        ({"seq_lens": ints(5)}, r"seq_lens must be \[num_reqs\] = \(2\), got shape \(1,\)"),
        ({"seq_lens": ints(5, 8).long()}, "seq_lens must be int32, got torch.int64"),
        # Case 23: a query that is no whole number of tokens per request.
        ({"query": randn(5, HEADS, 16)}, r"query must be .* with T a multiple of 2 requests, got"),
        ({"block_table": torch.zeros(2, 2, device="meta").int()}, "block_table must be on the"),
        ({"seq_lens": torch.zeros(2, device="meta").int()}, "seq_lens must be on the"),
    ],
    "mla_chunked_prefill": [*PAGED, *NEW],
    "mla_paged_attention": [*PAGED, *NEW],
}


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        pytest.param(function, changes, message, id=f"{function}-{message[:40]}")
        for function, refusals in REFUSALS.items()
        for changes, message in refusals
    ],
)
@pytest.mark.parametrize("fake", [False, True])
def test_what_does_not_fit_is_refused(function, changes, message, fake):
    """Real and fake alike (case 36: an fp8 query is refused, an fp8 cache is not)."""
    with pytest.raises(InvalidInputError, match=message):
        call(function, changes, fake)


# --- values --------------------------------------------------------------------------------------

PAST = torch.tensor([[3, 6], [0, 5]], dtype=torch.int32)  # six blocks: 0 to 5
BELOW = torch.tensor([[3, -1], [0, 5]], dtype=torch.int32)
NARROW = torch.tensor([[3], [0]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        # A slice past the end is short, and a negative one is somebody else's page.
        ("mla_decode", {"block_table": PAST}, "block_table"),
        ("mla_decode", {"block_table": BELOW}, "block_table"),
        ("mla_decode", {"block_table": PAST[:1, 1:], "seq_lens": ints(3)}, "block_table"),
        ("mla_decode", {"block_table": BELOW[:1, 1:], "seq_lens": ints(3)}, "block_table"),
        ("mla_decode", {"block_table": ints(5, 6)[None], "seq_lens": ints(6)}, "block_table"),
        ("mla_decode", {"block_table": NARROW}, "block_table"),
        ("gather_kv_cache", {"block_table": PAST}, "block_table"),
        ("gather_kv_cache", {"block_table": BELOW}, "block_table"),
        ("gather_kv_cache", {"block_table": NARROW}, "block_table"),
        ("gather_kv_cache", {"seq_starts": ints(-1, 0)}, "seq_starts"),
        ("gather_kv_cache", {"cu_seqlens_k": ints(0, 5, 3)}, "cu_seqlens_k"),
        ("gather_kv_cache", {"cu_seqlens_k": ints(-1, 2, 3)}, "cu_seqlens_k"),
        ("gather_kv_cache", {"cu_seqlens_k": ints(0, 4, 10)}, "cu_seqlens_k"),
        ("gather_kv_cache", {"cu_seqlens_k": ints(0, 9, 10)}, "cu_seqlens_k"),
        ("update_kv_cache", {"slot_mapping": torch.tensor([0, 24, 1, 2])}, "slot_mapping"),
        ("update_kv_cache", {"slot_mapping": torch.tensor([0, 2**40, 1, 2])}, "slot_mapping"),
        ("mla_prefill", {"cu_seqlens_q": ints(0, 1, 5)}, "cu_seqlens_q"),
        ("mla_prefill", {"cu_seqlens_k": ints(0, 4, 8)}, "cu_seqlens_k"),
        ("mla_prefill", {"cu_seqlens_q": ints(0, 3, 2)}, "cu_seqlens_q"),
        ("mla_prefill", {"cu_seqlens_k": ints(-1, 4, 7)}, "cu_seqlens_k"),
    ],
)
def test_indices_outside_of_the_memory_are_refused_on_a_cpu(function, changes, message):
    """Case 23 and what an illegal access is on a GPU: a clear error, never another's rows."""
    if function == "mla_decode" and len(changes["block_table"]) == 1:
        changes = changes | {"query": randn(1, HEADS, NOPE + ROPE)}
        changes = {"seq_lens": ints(8)} | changes
    with pytest.raises(InvalidInputError, match=message):
        call(function, changes)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_refused_write_changes_nothing(backend):
    cache = torch.zeros(6, BLOCK, WIDTH)
    slots = torch.tensor([0, 1, 2, 24])
    refused = pytest.raises(InvalidInputError, match=r"slot_mapping must be below 24, .* got 24")
    with mla_ops.use_backend(backend), refused:
        call("update_kv_cache", {"kv_cache": cache, "slot_mapping": slots})
    assert not cache.any()


@pytest.mark.parametrize("function", ["mla_chunked_prefill", "mla_paged_attention"])
@pytest.mark.parametrize("block", [6, -1])
def test_blocks_outside_of_the_cache_are_refused_in_a_batch(function, block):
    given = arguments(function)
    for request in range(2):
        given["metadata"].block_table[request, 0] = block
    with pytest.raises(InvalidInputError, match="block_table"):
        getattr(mla_ops, function)(**given)


@pytest.mark.parametrize("function", ["update_kv_cache", "gather_kv_cache", "mla_decode"])
@pytest.mark.parametrize(
    "cache",
    [
        randn(6, BLOCK, WIDTH + 1)[..., 1:],
        randn(BLOCK, 6, WIDTH).transpose(0, 1),
        randn(6, WIDTH, BLOCK).transpose(1, 2),
        randn(6 * (BLOCK * WIDTH + 1)).as_strided((6, BLOCK, WIDTH), (BLOCK * WIDTH + 1, WIDTH, 1)),
    ],
    ids=["wide-rows", "blocks-inside", "rows-inside", "odd-pitch"],
)
def test_a_cache_whose_rows_do_not_lie_in_line_is_refused(function, cache):
    """Case 31: a clear error where a layout is not supported."""
    message = r"kv_cache must have contiguous rows.* got shape \(6, 4, 26\) with strides"
    with pytest.raises(InvalidInputError, match=message):
        call(function, {"kv_cache": cache})


# --- gradients and backends ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("mla_prefill", "value"),
        ("merge_attn_states", "prefix_out"),
        ("mla_decode", "w_kv_b"),
        ("mla_chunked_prefill", "kv_c"),
        ("mla_paged_attention", "query"),
    ],
)
def test_a_gradient_is_refused_by_name(function, name):
    given = arguments(function)
    result = getattr(mla_ops, function)(**given | {name: given[name].requires_grad_()})
    with pytest.raises(UnsupportedInputError, match=f"no backend takes a gradient of {function}"):
        result.out.sum().backward()


def test_merging_into_a_tensor_has_no_gradient_either():
    given = arguments("merge_attn_states")
    out = torch.empty(4, HEADS, VALUE)
    given |= {"prefix_out": given["prefix_out"].requires_grad_(), "out": out}
    with pytest.raises(UnsupportedInputError, match="a gradient of merge_attn_states"):
        mla_ops.merge_attn_states(**given)
    assert not out.requires_grad


class Nothing:
    """A backend that takes nothing."""

    name = "nothing"

    def not_supported_reasons(self, call):
        return [f"sees no point in {call.op}"]


@pytest.fixture
def nothing():
    mla_ops.register_backend(Nothing(), automatic=False)
    with mla_ops.use_backend("nothing"):
        yield
    del dispatch._registry["nothing"]
    dispatch._select.cache_clear()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.usefixtures("nothing")
def test_a_backend_chosen_by_name_never_falls_back(function):
    message = rf"no backend takes {function} of float32 on cpu:\n  nothing: sees no point in"
    with pytest.raises(UnsupportedInputError, match=message):
        call(function, {})
