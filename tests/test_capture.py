"""Nothing on the decode path depends on values the host knows: emulated here, real graphs on a GPU.

Case numbers are those of the project's list of public bug reports in this field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops import MLADims, MLAMetadata, build_metadata
from mla_ops.errors import InvalidInputError
from mla_ops.testing import EmulatedGraph, HostSyncError, attention_inputs, forbid_host_sync

DIMS = MLADims(3, 20, 10, 6, 14)
SCALE = 0.37
BLOCK, BLOCKS, TABLE = 4, 64, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class CudaGraph:
    """A real graph under the interface of the emulated one."""

    def __init__(self, function: Callable[[], Any]) -> None:
        function()  # warm up: compile kernels outside of the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.result = function()

    def replay(self) -> Any:
        self.graph.replay()
        return self.result


def graph_of(device: str, function: Callable[[], Any]) -> Any:
    return EmulatedGraph(function) if device == "cpu" else CudaGraph(function)


# --- host syncs ---


SYNCS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: __import__("numpy").asarray(x),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "index": lambda x: [0, 1, 2][x.sum().long() * 0],
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "put by mask": lambda x: x.clone().index_put_((x > 0,), torch.tensor(1.0)),
    "unique": lambda x: x.unique(),
    "repeat": lambda x: torch.repeat_interleave(x.long()),
    "cpu": lambda x: x.cpu(),
}


@pytest.mark.parametrize("name", SYNCS)
def test_every_kind_of_sync_is_found(name: str) -> None:
    x = torch.tensor([1.0, 0.0, 2.0])
    SYNCS[name](x)  # allowed outside
    with pytest.raises(HostSyncError, match=r"on the host|by the values of"), forbid_host_sync():
        SYNCS[name](x)


def test_copies_between_devices_are_found_on_devices_that_are_not_there() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), forbid_host_sync():
        x = torch.empty(3, device="cuda")
        x.mul(2).cumsum(0)
        with pytest.raises(HostSyncError, match="from one device to another"):
            x.to("cpu", non_blocking=True)
        with pytest.raises(HostSyncError, match="reads a"):
            x.sum().item()


def test_what_needs_no_host_passes() -> None:
    x = torch.arange(6.0).view(2, 3)
    with forbid_host_sync():
        y = torch.softmax(x @ x.mT, -1)[:, :1].expand(2, 4).clone()
        y[:, 1:] += torch.where(x[:, :1] > 1, 0.0, 1.0)
        assert y.shape == (2, 4)


# --- the emulator ---


def test_a_replay_writes_where_the_capture_did() -> None:
    x, y = torch.ones(3), torch.zeros(3)
    graph = EmulatedGraph(lambda: (y.copy_(x * 2), x.view(3, 1).sum(1), x[1:] + 1))
    places = [t.data_ptr() for t in graph.result]
    x.fill_(5.0)
    again = graph.replay()
    assert [t.tolist() for t in again] == [[10.0] * 3, [5.0] * 3, [6.0] * 2]
    assert places == [t.data_ptr() for t in again]
    assert y.tolist() == [10.0] * 3


def test_baked_values_and_new_tensors_are_caught() -> None:
    length, box = torch.tensor([2]), [torch.ones(1)]
    baked = EmulatedGraph(lambda: torch.ones(4)[: int(length)].sum())
    stale = EmulatedGraph(lambda: box[0] * 1)
    length.fill_(3)
    box[0] = torch.zeros(1)
    assert baked.replay() == 2  # what a real graph would give, not 3
    assert stale.replay() == 1
    depends = EmulatedGraph(lambda: torch.arange(4)[torch.arange(4) < length])
    length.fill_(1)
    with pytest.raises(InvalidInputError, match=r"captured shape \(3,\), got \(1,\)"):
        depends.replay()


# --- the decode path ---


@dataclass
class Serving:
    """A paged cache full of tokens, and one step of decoding over it with static buffers."""

    device: str
    cache: Tensor
    w_kv_b: Tensor
    query: Tensor
    kv_c: Tensor
    k_pe: Tensor
    metadata: MLAMetadata

    @classmethod
    def make(cls, device: str, metadata: MLAMetadata, seed: int = 0) -> Serving:
        generator = torch.Generator().manual_seed(seed)
        d, tokens = DIMS, metadata.num_tokens

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        cache = draw(BLOCKS, BLOCK, d.kv_lora_rank + d.qk_rope_head_dim)
        return cls(
            device,
            cache,
            draw(d.num_heads * (d.qk_nope_head_dim + d.v_head_dim), d.kv_lora_rank) / 4,
            draw(tokens, d.num_heads, d.qk_nope_head_dim + d.qk_rope_head_dim),
            draw(tokens, d.kv_lora_rank),
            draw(tokens, d.qk_rope_head_dim),
            metadata,
        )

    def step(self) -> mla_ops.MLAOutput:
        """Write the new tokens, then attend to everything."""
        mla_ops.update_kv_cache(self.kv_c, self.k_pe, self.cache, self.metadata.slot_mapping)
        return mla_ops.mla_paged_attention(
            self.query,
            self.kv_c,
            self.k_pe,
            self.w_kv_b,
            self.cache,
            self.metadata,
            softmax_scale=SCALE,
        )

    def refill(self, seed: int) -> None:
        """New contents in the same buffers."""
        other = Serving.make(self.device, self.metadata, seed)
        for name in ("query", "kv_c", "k_pe"):
            getattr(self, name).copy_(getattr(other, name))

    def eager(self, cache: Tensor, metadata: MLAMetadata) -> mla_ops.MLAOutput:
        """The same step with a batch built for it, on a copy of the cache."""
        tokens = metadata.num_tokens
        parts = {name: getattr(self, name)[:tokens] for name in ("query", "kv_c", "k_pe")}
        return Serving(self.device, cache, self.w_kv_b, **parts, metadata=metadata).step()


def table_of(request: int) -> list[int]:
    """Scattered pages, none shared."""
    return [(request * TABLE + page) * 7 % BLOCKS for page in range(TABLE)]


def batch(seq_lens: list[int], query_lens: list[int] | None = None, **options: Any) -> MLAMetadata:
    lens = query_lens or [1] * len(seq_lens)
    table = torch.tensor([table_of(i) for i in range(len(seq_lens))], dtype=torch.int32)
    return build_metadata(
        lens, seq_lens, table.view(-1, TABLE), block_size=BLOCK, workspace_tokens=8, **options
    )


def replayed(serving: Serving, graph: Any, metadata: MLAMetadata, seed: int) -> None:
    """Replay with other contents, and compare with an eager run that knows them."""
    serving.refill(seed)
    serving.metadata.update_(metadata)
    before = serving.cache.clone()
    real = int(metadata.cu_seqlens_q[-1])
    expected, untouched = before.clone(), before.clone()
    out, lse = serving.eager(expected, metadata)
    result = graph.replay()
    torch.testing.assert_close(result.out[:real], out[:real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.lse[:, :real], lse[:, :real], rtol=1e-5, atol=1e-5)
    # Cases 75 and 79: rows of padding are 0, not NaN.
    assert not result.out[real:].any()
    # Case 78: nothing outside the real slots was written.
    torch.testing.assert_close(serving.cache, expected, rtol=0, atol=0)
    slots = metadata.slot_mapping[metadata.slot_mapping >= 0].to(serving.device)
    changed = (serving.cache != untouched).any(-1).view(-1).nonzero().flatten()
    assert set(changed.tolist()) <= set(slots.tolist())


@pytest.mark.parametrize("device", DEVICES)
def test_fifty_steps_that_grow_then_a_shorter_batch(device: str) -> None:
    # Case 76: over block borders; then shorter than what was captured.
    captured = batch([32, 32, 32], device=device)
    serving = Serving.make(device, captured)
    graph = graph_of(device, serving.step)
    addresses = {name: t.data_ptr() for name, t in vars(captured).items() if isinstance(t, Tensor)}
    lengths = [1, 5, 11]  # a decode has context, so at least 2
    for step in range(50):
        lengths = [length % 31 + 2 for length in lengths]
        replayed(serving, graph, batch(lengths, device=device), step)
    replayed(serving, graph, batch([2, 3, 2], device=device), 99)
    assert addresses == {name: getattr(captured, name).data_ptr() for name in addresses}


@pytest.mark.parametrize("device", DEVICES)
def test_batches_smaller_than_the_captured_one_are_padded(device: str) -> None:
    # Case 75: 8 captured, fewer real ones.
    serving = Serving.make(device, batch([32] * 8, pad_to=8, device=device))
    graph = graph_of(device, serving.step)
    for real in (8, 5, 1, 0, 7):
        lengths = [(3 * i + real) % 31 + 2 for i in range(real)]
        replayed(serving, graph, batch(lengths, pad_to=8, device=device), real)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("length", "page"), [(0, 0), (0, -1), (1, 0)])  # 1 promises a page
def test_fill_values_of_padding_rows(device: str, length: int, page: int) -> None:
    # Case 80: engines fill the lengths of padding rows with 0 or with 1, their pages with 0 or -1.
    d = DIMS
    serving = Serving.make(device, batch([9, 6, 32, 32], device=device))
    table, lens = serving.metadata.block_table, serving.metadata.seq_lens

    def decode() -> Any:
        return mla_ops.mla_decode(
            serving.query, serving.w_kv_b, serving.cache, table, lens, softmax_scale=SCALE
        )

    graph = graph_of(device, decode)
    expected = decode().out[:2].clone()
    lens[2:], table[2:] = length, page
    result = graph.replay()
    torch.testing.assert_close(result.out[:2], expected)
    assert result.out.shape == (4, d.num_heads, d.v_head_dim)
    if not length:
        assert not result.out[2:].any()
        assert (result.lse[:, 2:] == -float("inf")).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (8, 4, 2, 1)])
def test_graphs_of_several_sizes_share_a_cache(device: str, sizes: tuple[int, ...]) -> None:
    # Case 77: captured in ascending and in descending order, the first replayed after an eager run.
    largest = Serving.make(device, batch([32] * 8, device=device))
    graphs = []
    for size in sizes:
        serving = Serving.make(device, batch([32] * size, device=device))
        serving.cache = largest.cache
        graphs.append((size, serving, graph_of(device, serving.step)))
    largest.step()
    for size, serving, graph in graphs:
        replayed(serving, graph, batch([5 + 2 * i for i in range(size)], device=device), size)


@pytest.mark.parametrize("device", DEVICES)
def test_dense_attention_over_a_static_cache(device: str) -> None:
    """`kv_bounds` are read on the device: the filled part grows without a new capture."""
    query, kv_c, k_pe, w_kv_b = attention_inputs(DIMS, (2, 1, 40), device=device)[:4]
    bounds = torch.tensor([[0, 40], [3, 40]], dtype=torch.int32, device=device)

    def attend() -> Any:
        return mla_ops.mla_attention(
            query, kv_c, k_pe, w_kv_b, softmax_scale=SCALE, kv_bounds=bounds
        )

    graph = graph_of(device, attend)
    for filled in (1, 7, 39, 40, 2, 0):
        bounds[:, 1] = filled
        result, expected = graph.replay(), attend()
        torch.testing.assert_close(result.out, expected.out, rtol=1e-5, atol=1e-5)


def test_decode_path_needs_no_host() -> None:
    serving = Serving.make("cpu", batch([9, 6, 32]))
    with forbid_host_sync():
        serving.step()
        mla_ops.mla_decode(
            serving.query,
            serving.w_kv_b,
            serving.cache,
            serving.metadata.block_table,
            serving.metadata.seq_lens,
            softmax_scale=SCALE,
        )


@torch.no_grad()
def test_decode_of_a_compiled_model_needs_no_host() -> None:
    pytest.importorskip("transformers")
    from families import FAMILIES, forward, relative_error, sample_input_ids, scenarios

    from mla_ops.passes import make_backend

    def guarded(gm: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with forbid_host_sync():
                return gm.forward(*args)

        return run

    model = FAMILIES["youtu"].build()  # no mixture of experts, which is routed by masks
    caches = [scenarios.static_cache(model) for _ in range(2)]
    for cache in caches:
        forward(model, sample_input_ids(2, 6), cache=cache)
    compiled = torch.compile(model, backend=make_backend(guarded), fullgraph=True)
    token = sample_input_ids(2, 1)
    actual = compiled(input_ids=token, use_cache=True, cache=caches[0]).logits
    expected = forward(model, token, cache=caches[1]).logits
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.gpu
@torch.no_grad()
def test_reduce_overhead_skips_no_cuda_graph() -> None:
    from families import FAMILIES, forward, relative_error, sample_input_ids, scenarios
    from torch._dynamo.utils import counters

    model = FAMILIES["deepseek_v3"].build().cuda()
    caches = [scenarios.static_cache(model, 64) for _ in range(2)]
    for cache in caches:
        forward(model, sample_input_ids(2, 6).cuda(), cache=cache)
    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
        compiled = torch.compile(model, backend="mla_ops", mode="reduce-overhead", fullgraph=True)
        for step in range(50):
            token = sample_input_ids(2, 1, seed=step).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            actual = compiled(input_ids=token, cache=caches[0], use_cache=True).logits.clone()
            expected = forward(model, token, cache=caches[1]).logits
            assert relative_error(actual, expected) < 1e-4
    assert counters["inductor"]["cudagraph_skips"] == 0
