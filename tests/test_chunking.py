"""The chunk planner: every cached row exactly once, in order, in as few chunks as there can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_ops.chunking import plan_chunks
from mla_ops.errors import InvalidInputError

contexts = st.lists(st.integers(0, 40) | st.integers(0, 400), max_size=9)


def pieces(context_lens, workspace_tokens):
    """The pieces of each chunk, `(request, first row, end)`, as the plan has them."""
    plan = plan_chunks(context_lens, workspace_tokens)
    assert plan.starts.shape == plan.lens.shape == (plan.num_chunks, len(context_lens))
    return [
        [(i, s, s + n) for i, (s, n) in enumerate(zip(starts, lens, strict=True)) if n]
        for starts, lens in zip(plan.starts.tolist(), plan.lens.tolist(), strict=True)
    ]


@given(contexts, st.integers(1, 130))
def test_every_row_is_in_one_chunk_and_in_order(context_lens, workspace_tokens):
    rows = [
        (request, row)
        for chunk in pieces(context_lens, workspace_tokens)
        for request, first, end in chunk
        for row in range(first, end)
    ]
    assert rows == [(i, row) for i, length in enumerate(context_lens) for row in range(length)]


@given(contexts, st.integers(1, 130))
def test_there_are_as_few_chunks_as_there_can_be(context_lens, workspace_tokens):
    plan = plan_chunks(context_lens, workspace_tokens)
    assert plan.num_chunks == -(-sum(context_lens) // workspace_tokens)
    used = plan.lens.sum(axis=1)
    assert (used[:-1] == workspace_tokens).all()
    assert (used[-1:] > 0).all()
    assert (used <= workspace_tokens).all()


@given(contexts, st.integers(1, 130))
def test_only_the_first_request_of_a_chunk_continues(context_lens, workspace_tokens):
    for chunk in pieces(context_lens, workspace_tokens):
        assert all(first == 0 for _, first, _ in chunk[1:])
        assert all(end == context_lens[request] for request, _, end in chunk[:-1])


@given(contexts, st.integers(1, 130))
def test_a_request_that_takes_no_part_is_all_zero(context_lens, workspace_tokens):
    plan = plan_chunks(context_lens, workspace_tokens)
    assert (plan.starts[plan.lens == 0] == 0).all()
    assert (plan.lens >= 0).all()


@given(contexts, st.integers(1, 130), st.data())
def test_an_empty_context_changes_nothing_for_the_others(context_lens, workspace_tokens, data):
    where = data.draw(st.integers(0, len(context_lens)))
    longer = [*context_lens[:where], 0, *context_lens[where:]]
    plan, other = plan_chunks(context_lens, workspace_tokens), plan_chunks(longer, workspace_tokens)
    np.testing.assert_array_equal(np.delete(other.starts, where, axis=1), plan.starts)
    np.testing.assert_array_equal(np.delete(other.lens, where, axis=1), plan.lens)


@given(contexts, st.integers(1, 130))
def test_cu_seqlens_says_where_rows_lie_in_the_workspace(context_lens, workspace_tokens):
    plan = plan_chunks(context_lens, workspace_tokens)
    cu = plan.cu_seqlens
    assert cu.shape == (plan.num_chunks, len(context_lens) + 1)
    assert (cu[:, 0] == 0).all()
    np.testing.assert_array_equal(np.diff(cu, axis=1), plan.lens)


def test_all_arrays_are_int32():
    plan = plan_chunks([5, 3], 4)
    assert {plan.starts.dtype, plan.lens.dtype, plan.cu_seqlens.dtype} == {np.dtype(np.int32)}


# Cases 15 (b) and 88: an equal share per request needs 30 and 4 chunks here.
@pytest.mark.parametrize(
    ("context_lens", "workspace_tokens", "num_chunks"),
    [
        ([60_000] + [16] * 31, 65_536, 1),
        ([16] * 31 + [60_000], 65_536, 1),
        ([60, 1, 1, 1], 64, 1),
        ([1024] * 3, 1024, 3),
        ([2048, 320], 1024, 3),
        ([960] + [16] * 7, 1024, 2),
        ([37, 1000, 5], 64, 17),
        ([64], 64, 1),
        ([65], 64, 2),
        ([1], 1, 1),
        ([0, 0], 1, 0),
        ([], 1, 0),
        ([3, 2], 1, 5),
    ],
)
def test_number_of_chunks(context_lens, workspace_tokens, num_chunks):
    assert plan_chunks(context_lens, workspace_tokens).num_chunks == num_chunks


# Case 15 (a): 64 rows for five requests are 12 each, which is no whole page of 16.
def test_more_requests_than_a_page_each():
    assert pieces([20, 20, 20, 20, 20], 64) == [
        [(0, 0, 20), (1, 0, 20), (2, 0, 20), (3, 0, 4)],
        [(3, 4, 20), (4, 0, 20)],
    ]


def test_a_long_request_is_cut_and_its_rest_is_packed_with_the_next():
    assert pieces([9, 0, 2], 4) == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 9), (2, 0, 2)]]


def test_totals_may_exceed_32_bits():
    longest = 2**31 - 1
    plan = plan_chunks([longest, longest, longest], 2**31 - 1)
    assert plan.lens.tolist() == [[longest, 0, 0], [0, longest, 0], [0, 0, longest]]


@pytest.mark.parametrize("workspace_tokens", [0, -1])
def test_a_workspace_without_rows_is_refused(workspace_tokens):
    message = f"workspace_tokens must be at least 1, got {workspace_tokens}"
    with pytest.raises(InvalidInputError, match=message):
        plan_chunks([3], workspace_tokens)


@pytest.mark.parametrize("length", [-1, 2**31])
def test_an_impossible_context_is_refused(length):
    message = rf"context_lens must be between 0 and 2147483647, got \[4, {length}\]"
    with pytest.raises(InvalidInputError, match=message):
        plan_chunks([4, length], 16)
