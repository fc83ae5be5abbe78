"""Batch metadata: equal to a brute-force count, split once, built without a sync, updated in place.

Case numbers are those of the project's list of public bug reports in this field.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_ops import InvalidInputError, build_metadata, reorder_batch
from mla_ops.metadata import MLAMetadata

GARBAGE = 10**8
TENSORS = tuple(f.name for f in dataclasses.fields(MLAMetadata) if f.type == "Tensor")
INTS = tuple(f.name for f in dataclasses.fields(MLAMetadata) if f.type == "int")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclasses.dataclass
class Batch:
    """Requests as `build_metadata` takes them; blocks are scattered, rows end in garbage."""

    query_lens: list[int]
    seq_lens: list[int]
    unfinished: list[bool]
    table: list[list[int]]
    block_size: int

    def ordered(self, threshold: int) -> Batch:
        order = reorder_batch(
            self.query_lens,
            self.seq_lens,
            decode_threshold=threshold,
            is_prefilling=self.unfinished,
        ).permutation
        columns = (self.query_lens, self.seq_lens, self.unfinished, self.table)
        return Batch(*([column[i] for i in order] for column in columns), self.block_size)

    def build(self, threshold: int = 1, workspace_tokens: int = 16, **options) -> MLAMetadata:
        return build_metadata(
            self.query_lens,
            self.seq_lens,
            self.table,
            block_size=self.block_size,
            workspace_tokens=workspace_tokens,
            decode_threshold=threshold,
            is_prefilling=self.unfinished,
            **options,
        )

    def slots(self) -> list[int]:
        """The slot of every new token, one at a time."""
        return [
            row[position // self.block_size] * self.block_size + position % self.block_size
            for new, length, row in zip(self.query_lens, self.seq_lens, self.table, strict=True)
            for position in range(length - new, length)
        ]


def make_batch(query_lens, contexts, block_size=4, unfinished=None, extra_blocks=0, seed=0):
    seq_lens = [new + old for new, old in zip(query_lens, contexts, strict=True)]
    needed = [-(-length // block_size) for length in seq_lens]
    ids = np.random.default_rng(seed).permutation(sum(needed) + 3).tolist()
    table = [[ids.pop() for _ in range(count)] + [GARBAGE] * extra_blocks for count in needed]
    flags = unfinished or [False] * len(query_lens)
    return Batch(list(query_lens), seq_lens, list(flags), table, block_size)


@st.composite
def batches(draw, max_new=6):
    request = st.tuples(
        st.integers(0, max_new), st.integers(0, 3) | st.integers(0, 40), st.booleans()
    )
    requests = draw(st.lists(request, max_size=8))
    new, old, flags = ([request[i] for request in requests] for i in range(3))
    if draw(st.booleans()):
        flags = [False] * len(new)
    return make_batch(
        new, old, draw(st.integers(1, 9)), flags, draw(st.integers(0, 3)), draw(st.integers(0, 99))
    )


def decodes_of(batch, threshold):
    """How many requests are decodes of the longest kind, and how long these are."""
    columns = (batch.query_lens, batch.seq_lens, batch.unfinished)
    lens = [
        new
        for new, length, flag in zip(*columns, strict=True)
        if 0 < new <= threshold and length > new and not flag
    ]
    longest = max(lens, default=0)
    return lens.count(longest), longest


# --- the order of a batch ------------------------------------------------------------------------


@given(batches(), st.integers(1, 4))
def test_permutation_and_inverse_round_trip(batch, threshold):
    order = reorder_batch(batch.query_lens, batch.seq_lens, decode_threshold=threshold)
    items = list(range(len(batch.query_lens)))
    ordered = [items[i] for i in order.permutation]
    assert sorted(ordered) == items
    assert [ordered[i] for i in order.inverse] == items


@given(batches(), st.integers(1, 4))
def test_order_is_by_region_and_stable(batch, threshold):
    order = reorder_batch(
        batch.query_lens,
        batch.seq_lens,
        decode_threshold=threshold,
        is_prefilling=batch.unfinished,
    )

    def region(i):
        new, length, flag = batch.query_lens[i], batch.seq_lens[i], batch.unfinished[i]
        if length == new:
            return "prefill"
        if new > threshold:
            return "long extend"
        return "short extend" if flag or new == 0 else f"decode {threshold - new}"

    places = [*(f"decode {i}" for i in range(4)), "short extend", "long extend", "prefill"]
    keys = [(places.index(region(i)), i) for i in order.permutation]
    assert keys == sorted(keys)


def test_an_ordered_batch_stays_as_it_is():
    assert reorder_batch([1, 1, 5, 7], [9, 4, 12, 7]).permutation == (0, 1, 2, 3)


def test_speculative_decodes_of_one_length_come_first():
    """Case 20: a one-token tail stood in front of the decodes and made them prefills."""
    batch = make_batch([3, 1, 3, 200, 3], [50, 99, 70, 0, 10])
    order = reorder_batch(batch.query_lens, batch.seq_lens, decode_threshold=3)
    assert order.permutation == (0, 2, 4, 1, 3)
    assert order.inverse == (0, 3, 1, 4, 2)
    metadata = batch.ordered(3).build(threshold=3)
    assert (metadata.num_decodes, metadata.decode_query_len) == (3, 3)
    assert (metadata.num_prefills, metadata.num_decode_tokens) == (2, 9)


@given(batches(), st.integers(1, 4), st.integers(1, 4))
def test_another_threshold_is_refused_or_changes_nothing(batch, sorted_with, split_with):
    """Case 22: sorted with one threshold, split with another."""
    ordered = batch.ordered(sorted_with)
    try:
        metadata = ordered.build(threshold=split_with)
    except InvalidInputError as error:
        assert "requests must come decodes first" in str(error)  # noqa: PT017
        assert sorted_with != split_with
    else:
        assert (metadata.num_decodes, metadata.decode_query_len) == decodes_of(batch, split_with)


@pytest.mark.parametrize(
    ("query_lens", "contexts", "sorted_with", "split_with"),
    [([1, 3, 1], [9, 9, 9], 1, 3), ([3, 1, 1], [9, 9, 9], 3, 1), ([2, 2, 1], [9, 9, 9], 2, 1)],
)
def test_sorting_and_splitting_with_different_thresholds_is_refused(
    query_lens, contexts, sorted_with, split_with
):
    """Case 22."""
    batch = make_batch(query_lens, contexts).ordered(sorted_with)
    message = f"requests must come decodes first.* the same decode_threshold {split_with}"
    with pytest.raises(InvalidInputError, match=message):
        batch.build(threshold=split_with)


# --- the plan against a brute-force count --------------------------------------------------------


@given(batches(), st.integers(1, 4), st.integers(1, 50))
def test_metadata_equals_a_brute_force_count(batch, threshold, workspace_tokens):
    batch = batch.ordered(threshold)
    metadata = batch.build(threshold, workspace_tokens)
    new, seqs = batch.query_lens, batch.seq_lens
    count = len(new)
    cu = [sum(new[:i]) for i in range(count + 1)]
    decodes, decode_len = decodes_of(batch, threshold)
    assert (metadata.num_reqs, metadata.num_tokens) == (count, sum(new))
    assert (metadata.num_decodes, metadata.decode_query_len) == (decodes, decode_len)
    assert metadata.num_prefills == count - decodes
    assert metadata.num_decode_tokens == decodes * decode_len == cu[decodes]
    assert metadata.max_query_len == max(new, default=0)
    assert metadata.max_seq_len == max(seqs, default=0)
    assert (metadata.block_size, metadata.workspace_tokens) == (batch.block_size, workspace_tokens)
    assert metadata.cu_seqlens_q.tolist() == cu
    assert metadata.seq_lens.tolist() == seqs
    assert metadata.host.tolist() == [cu, [*seqs, 0]]
    assert metadata.slot_mapping.tolist() == batch.slots()
    needed = [-(-length // batch.block_size) for length in seqs]
    for row, mine, count in zip(metadata.block_table, batch.table, needed, strict=True):
        assert row[:count].tolist() == mine[:count]

    # The cached rows of the prefills, in order: every one in exactly one chunk.
    rows = [
        (request, row)
        for starts, cu_k in zip(
            metadata.chunk_starts.tolist(), metadata.chunk_cu_seqlens.tolist(), strict=True
        )
        for request, (first, begin, end) in enumerate(zip(starts, cu_k[:-1], cu_k[1:], strict=True))
        for row in range(first, first + end - begin)
    ]
    contexts = [length - n for n, length in zip(new, seqs, strict=True)][decodes:]
    assert rows == [(i, row) for i, context in enumerate(contexts) for row in range(context)]
    assert metadata.num_chunks == -(-sum(contexts) // workspace_tokens)


def test_shapes_and_dtypes():
    metadata = make_batch([1, 1, 5], [8, 3, 7]).build(workspace_tokens=3)
    tensors = {name: getattr(metadata, name) for name in TENSORS}
    described = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    assert described == {
        "host": ((2, 4), torch.int32),
        "cu_seqlens_q": ((4,), torch.int32),
        "seq_lens": ((3,), torch.int32),
        "block_table": ((3, 3), torch.int32),
        "slot_mapping": ((7,), torch.int64),
        "chunk_starts": ((3, 1), torch.int32),
        "chunk_cu_seqlens": ((3, 2), torch.int32),
    }


# Sections of a batch: uniform decodes, then everything else.
@pytest.mark.parametrize(
    ("query_lens", "contexts", "unfinished", "expected"),
    [
        ([2, 2, 1, 3], [9, 9, 9, 9], None, (2, 2)),
        ([1, 1, 1], [9, 9, 9], None, (3, 1)),
        ([3, 200], [9, 9], None, (0, 0)),
        ([0, 0], [9, 0], None, (0, 0)),
        ([1, 1], [9, 0], None, (1, 1)),  # a prompt of one token is no decode
        ([2, 2], [9, 9], [False, True], (1, 2)),  # nor is a prompt's last piece of two
        ([], [], None, (0, 0)),
    ],
)
def test_split(query_lens, contexts, unfinished, expected):
    metadata = make_batch(query_lens, contexts, unfinished=unfinished).build(threshold=2)
    assert (metadata.num_decodes, metadata.decode_query_len) == expected


def test_a_decode_behind_a_prefill_is_refused():
    """Case 21: the order is part of the contract, not a habit."""
    with pytest.raises(InvalidInputError, match="request 1 with 1 new tokens comes too late"):
        make_batch([7, 1], [0, 9]).build()


def test_chunks_need_no_option_of_their_own():
    """Case 14: chunk metadata hung on a flag, but a cached prefix needs it without the flag."""
    metadata = make_batch([5], [32]).build(workspace_tokens=65_536)
    assert (metadata.num_chunks, metadata.chunk_cu_seqlens.tolist()) == (1, [[0, 32]])


def test_decodes_take_no_room_in_chunks():
    metadata = make_batch([1, 1, 4], [500, 300, 6]).build(workspace_tokens=4)
    assert metadata.chunk_starts.tolist() == [[0], [4]]
    assert metadata.chunk_cu_seqlens.tolist() == [[0, 4], [0, 2]]


def test_requests_without_tokens():
    """Case 81: zero-length rows count in every array alike."""
    metadata = make_batch([1, 0, 0, 3], [5, 0, 6, 0]).build()
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 1, 1, 4]
    assert metadata.seq_lens.tolist() == [6, 0, 6, 3]
    assert metadata.chunk_cu_seqlens.tolist() == [[0, 0, 6, 6]]
    nothing = build_metadata([0, 0], [0, 0], [[], []], block_size=4, workspace_tokens=1)
    assert (nothing.num_tokens, nothing.num_chunks, nothing.block_table.shape) == (0, 0, (2, 0))


@pytest.mark.parametrize("kind", ["lists", "int32", "int64", "numpy"])
def test_a_block_table_may_be_given_in_any_of_its_forms(kind):
    batch = make_batch([1, 6], [5, 6], extra_blocks=2)
    width = max(map(len, batch.table))
    padded = [row + [GARBAGE] * (width - len(row)) for row in batch.table]
    forms = {
        "lists": batch.table,
        "int32": torch.tensor(padded, dtype=torch.int32),
        "int64": torch.tensor(padded),
        "numpy": [np.array(row) for row in batch.table],
    }
    batch.table = forms[kind]
    metadata = batch.build()
    assert metadata.block_table.dtype == torch.int32
    assert metadata.slot_mapping.tolist() == make_batch([1, 6], [5, 6], extra_blocks=2).slots()


def test_lengths_may_come_from_numpy_and_stay_host_ints():
    batch = make_batch([1, 4], [5, 6])
    batch.query_lens, batch.seq_lens = np.array(batch.query_lens), np.array(batch.seq_lens)
    metadata = batch.build()
    assert {name: type(getattr(metadata, name)) for name in INTS} == dict.fromkeys(INTS, int)


def test_entries_behind_a_length_may_be_any_number():
    lists = build_metadata([1], [3], [[2, 2**40, -7]], block_size=4, workspace_tokens=1)
    tensor = torch.tensor([[2, 2**40, -7]])
    assert lists.slot_mapping.tolist() == [10]
    given_tensor = build_metadata([1], [3], tensor, block_size=4, workspace_tokens=1)
    assert given_tensor.slot_mapping.tolist() == [10]


# --- the device ----------------------------------------------------------------------------------


class CopiesToDevice(TorchDispatchMode):
    """Counts the ops whose inputs lie on the host and whose result lies on a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [a for a in args if isinstance(a, Tensor)]
        moved = isinstance(result, Tensor) and result.device.type == "meta"
        self.count += moved and any(a.device.type == "cpu" for a in inputs)
        return result


@pytest.mark.parametrize("table_on_device", [False, True])
def test_the_number_of_copies_does_not_grow_with_the_batch(table_on_device):
    """A sync would raise: nothing can be read from a meta tensor."""
    counts = set()
    for requests, context in ((1, 0), (2, 9), (40, 30)):
        batch = make_batch([1] * requests + [4] * requests, [7] * requests + [context] * requests)
        width = max(map(len, batch.table))
        if table_on_device:
            batch.table = torch.zeros(2 * requests, width, dtype=torch.int32, device="meta")
        with CopiesToDevice() as copies:
            metadata = batch.build(workspace_tokens=3, device="meta")
        counts.add(copies.count)
        on_device = {name for name in TENSORS if getattr(metadata, name).device.type == "meta"}
        assert on_device == {*TENSORS} - {"host"}
        assert metadata.slot_mapping.shape == (5 * requests,)
    assert counts == {1}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_caller_keeps_the_block_table(device):
    """Updating a captured batch in place must not write into the table that it was built from."""
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
    options = {"block_size": 4, "workspace_tokens": 1, "device": device}
    metadata = build_metadata([1, 1], [5, 7], table, **options)
    assert not torch._C._is_alias_of(metadata.block_table, table)


# --- padding and updating in place ---------------------------------------------------------------


def test_padding_is_empty_requests_without_slots():
    batch = make_batch([2, 2], [5, 8])
    metadata = batch.build(threshold=2, pad_to=5)
    assert (metadata.num_reqs, metadata.num_decodes, metadata.num_prefills) == (5, 5, 0)
    assert (metadata.num_tokens, metadata.num_decode_tokens) == (10, 10)
    assert metadata.cu_seqlens_q.tolist() == [0, 2, 4, 4, 4, 4]
    assert metadata.seq_lens.tolist() == [7, 10, 0, 0, 0]
    assert metadata.host.tolist() == [[0, 2, 4, 4, 4, 4], [7, 10, 0, 0, 0, 0]]
    assert metadata.block_table.shape == (5, 3)
    assert metadata.slot_mapping.tolist() == batch.slots() + [-1] * 6


def test_padding_to_the_size_that_is_there_changes_nothing():
    batch = make_batch([1, 1], [5, 8])
    plain, padded = batch.build(), batch.build(pad_to=2)
    for name in (*TENSORS, *INTS):
        one, other = getattr(plain, name), getattr(padded, name)
        assert torch.equal(one, other) if name in TENSORS else one == other


@pytest.mark.parametrize("threshold", [1, 3])
def test_a_batch_of_padding_only_has_the_shape_of_a_real_one(threshold):
    nothing, real = make_batch([], []), make_batch([threshold] * 2, [5, 8])
    nothing.table = torch.empty(0, max(map(len, real.table)), dtype=torch.int32)
    captured = real.build(threshold, pad_to=4)
    captured.update_(nothing.build(threshold, pad_to=4))
    assert captured.slot_mapping.tolist() == [-1] * 4 * threshold
    assert captured.seq_lens.tolist() == [0] * 4


def test_padding_needs_a_batch_of_decodes_that_fits():
    with pytest.raises(InvalidInputError, match="at most 4 decodes, got 1 decodes among 2 req"):
        make_batch([1, 5], [9, 0]).build(pad_to=4)
    with pytest.raises(InvalidInputError, match="at most 1 decodes, got 2 decodes among 2 req"):
        make_batch([1, 1], [9, 9]).build(pad_to=1)


def snapshot(metadata):
    return {name: getattr(metadata, name).clone() for name in TENSORS}


def test_update_keeps_every_address():
    """Case 76: a replayed graph reads what it was captured with, so that must be what changes."""
    captured = make_batch([1, 1, 4], [9, 8, 11], seed=1).build(workspace_tokens=4)
    other = make_batch([1, 1, 4], [5, 8, 9], seed=2).build(workspace_tokens=4)
    before = {name: getattr(captured, name).data_ptr() for name in TENSORS}
    captured.update_(other)
    for name in TENSORS:
        assert getattr(captured, name).data_ptr() == before[name]
        assert torch.equal(getattr(captured, name), getattr(other, name)), name


CAPTURED = ([1, 1, 4], [9, 8, 11])


@pytest.mark.parametrize(
    ("query_lens", "contexts", "options", "message"),
    [
        ([1, 1, 1, 4], [9, 8, 3, 8], {}, "num_reqs 3, got 4"),
        ([1, 1, 3], CAPTURED[1], {}, "num_tokens 6, got 5"),
        ([1, 2, 3], [9, 8, 11], {}, "num_decodes 2, got 1"),
        ([2, 1, 3], [9, 8, 11], {"threshold": 2}, "num_decodes 2, got 1"),
        ([1, 1, 4], [9, 8, 20], {}, "num_chunks 3, got 5"),
        ([1, 1, 4], [40, 8, 11], {}, "max_seq_len of at most the captured 15, got 41"),
        ([1, 1, 4], [9, 7, 9], {"block_size": 5}, "block_size 4, got 5"),
        ([1, 1, 4], [9, 8, 11], {"workspace_tokens": 5}, "workspace_tokens 4, got 5"),
        ([1, 1, 4], [9, 8, 11], {"extra_blocks": 1}, r"block_table of .* \(3, 4\), got \(3, 5\)"),
    ],
)
def test_update_refuses_another_shape_and_changes_nothing(query_lens, contexts, options, message):
    captured = make_batch(*CAPTURED).build(workspace_tokens=4)
    before = snapshot(captured)
    build = {"workspace_tokens": 4} | options
    make = {name: build.pop(name) for name in ("block_size", "extra_blocks") if name in build}
    other = make_batch(query_lens, contexts, seed=3, **make).build(**build)
    with pytest.raises(InvalidInputError, match=f"update_ needs .*{message}"):
        captured.update_(other)
    assert all(torch.equal(getattr(captured, name), before[name]) for name in TENSORS)


def test_update_refuses_a_longer_query():
    captured = make_batch([1, 3, 3], [9, 0, 0]).build()
    other = make_batch([1, 1, 5], [9, 0, 0]).build()
    with pytest.raises(InvalidInputError, match="max_query_len of at most the captured 3, got 5"):
        captured.update_(other)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "table", "options", "message"),
    [
        # Case 81: arrays of different length.
        ([1, 1], [3], [[0]], {}, "query_lens and seq_lens must be equally long, got 2 and 1"),
        # Case 34: seq_len counts the new tokens.
        ([3], [2], [[0]], {}, "request 0 has query_len 3 and seq_len 2"),
        ([1, -1], [3, 3], [[0], [1]], {}, "request 1 has query_len -1 and seq_len 3"),
        ([1], [2**31], [[0]], {}, r"seq_len < 2\*\*31"),
        ([1], [3], [[0]], {"block_size": 0}, "block_size and decode_threshold must be at least 1"),
        ([1], [3], [[0]], {"decode_threshold": 0}, "must be at least 1, got 4 and 0"),
        ([1], [3], [[0]], {"workspace_tokens": 0}, "workspace_tokens must be at least 1, got 0"),
        ([1], [3], [[0]], {"is_prefilling": [True] * 2}, "must have 1 entries, got 2"),
        ([1], [3], [[0], [1]], {}, "block_table must have 1 rows, got 2"),
        ([1], [3], torch.zeros(2, 1).int(), {}, r"with 1 rows, got shape \(2, 1\)"),
        (
            [1],
            [3],
            torch.zeros(1).int(),
            {},
            r"must be \[num_reqs, max_blocks\].* got shape \(1,\)",
        ),
        ([1], [9], [[0, 1]], {}, "request 0 of length 9 needs 3 blocks of 4, .* row has 2"),
        ([1], [9], torch.zeros(1, 2).int(), {}, "needs 3 blocks of 4, its block_table row has 2"),
        # A slot below 0 means "skip", so a negative block would lose tokens in silence.
        ([1], [9], [[0, 1, -1]], {}, "block_table"),
        ([1], [9], torch.tensor([[0, -1, 1]]), {}, "block_table"),
        ([1], [3], [[2**31]], {}, "block_table"),
        ([1], [3], torch.zeros(1, 1), {}, "block_table must be .*int"),
    ],
)
def test_what_does_not_fit_is_refused(query_lens, seq_lens, table, options, message):
    arguments = {"block_size": 4, "workspace_tokens": 8} | options
    with pytest.raises(InvalidInputError, match=message):
        build_metadata(query_lens, seq_lens, table, **arguments)


def test_reordering_refuses_what_does_not_fit():
    with pytest.raises(InvalidInputError, match="equally long, got 1 and 2"):
        reorder_batch([1], [2, 3])
    with pytest.raises(InvalidInputError, match="request 0 has query_len 3 and seq_len 2"):
        reorder_batch([3], [2])
    with pytest.raises(InvalidInputError, match="is_prefilling must have 1 entries, got 0"):
        reorder_batch([1], [2], is_prefilling=[])
