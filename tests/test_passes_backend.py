"""The passes inside torch.compile: the backend, Inductor, its caches, generation, training."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from families import (
    FAMILIES,
    forward_logits,
    one_thread,
    relative_error,
    sample_input_ids,
    scenarios,
)
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule
from toys import Eager, H, L, Toy, V, inputs, with_bias

from mla_ops.bench import peak_bytes
from mla_ops.errors import InvalidInputError, RewriteError
from mla_ops.passes import MLAPass, RewriteReport, inductor, make_backend
from mla_ops.passes.backend import mla_ops_backend


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


class Counted:
    """How often the op runs, compiled or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from mla_ops.kernels.tiled import TiledBackend

        monkeypatch.setenv("MLA_OPS_BACKEND", "tiled")
        self.calls = 0
        original = TiledBackend.mla_attention

        def counted(*args: Any) -> Any:
            self.calls += 1
            return original(*args)

        monkeypatch.setattr(TiledBackend, "mla_attention", counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


# --- the backend by name ---


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"epilogue_fusion": False, "mla_ops.strict": True}},
        {"options": {"mla_ops.mode": "reduce-overhead", "max_autotune": False}},
        {"dynamic": True},
    ],
    ids=str,
)
def test_backend_is_found_by_name(options: dict[str, Any], counted: Counted) -> None:
    toy, args = Toy(), inputs()
    assert "mla_ops" in torch._dynamo.list_backends(exclude_tags=())
    compiled = torch.compile(toy, backend="mla_ops", fullgraph=True, **options)
    close(compiled(*args), toy(*args))
    assert counted.calls == 1


@torch.no_grad()
def test_pass_goes_with_plain_inductor(counted: Counted) -> None:
    toy, args, reports = Toy(), inputs(), []
    ours = MLAPass(on_report=reports.append)
    compiled = torch.compile(toy, fullgraph=True, options={"pre_grad_custom_pass": ours})
    close(compiled(*args), toy(*args))
    assert counted.calls == 1
    assert [len(report.matched) for report in reports] == [1]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_backend_goes_in_front_of_any_other(inner: str, counted: Counted) -> None:
    toy, args = Toy(), inputs()
    compiled = torch.compile(toy, backend=make_backend(inner), fullgraph=True)
    close(compiled(*args), toy(*args))
    assert counted.calls == 1


def test_mode_and_options_reach_a_backend_of_the_user() -> None:
    got: list[dict[str, Any]] = []

    def inner(gm: GraphModule, _: list[Tensor], **kwargs: Any) -> Callable[..., Any]:
        got.append(kwargs)
        return gm.forward

    def compile_toy(**kwargs: Any) -> None:
        torch._dynamo.reset()
        torch.compile(Toy(), backend=make_backend(inner), **kwargs)(*inputs())

    compile_toy()
    compile_toy(mode="reduce-overhead")  # what generate() passes
    compile_toy(options={"mla_ops.mode": "reduce-overhead", "a": 1})
    assert got == [
        {},
        {"mode": "reduce-overhead"},
        {"mode": "reduce-overhead", "options": {"a": 1}},
    ]


def test_unknown_options_are_refused() -> None:
    compiled = torch.compile(Toy(), backend=make_backend("eager"), options={"mla_ops.stric": True})
    with pytest.raises(BackendCompilerFailed, match=r"got mla_ops\.stric") as caught:
        compiled(*inputs())
    assert isinstance(caught.value.inner_exception, InvalidInputError)


def test_strict_fails_the_compile_with_the_table() -> None:
    compiled = torch.compile(with_bias(), backend="mla_ops", options={"mla_ops.strict": True})
    with pytest.raises(BackendCompilerFailed, match="kv_b_proj has a bias") as caught:
        compiled(*inputs())
    assert isinstance(caught.value.inner_exception, RewriteError)


def test_reset_is_passed_on() -> None:
    mla_ops_backend.reset()  # type: ignore[attr-defined]
    torch._dynamo.reset()


# --- compile caches ---


def test_uuid_depends_on_options_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    # Case 61.
    ids = {MLAPass().uuid(), MLAPass(strict=True).uuid()}
    ids |= {
        MLAPass(disable=["fuse_attention"]).uuid(),
        MLAPass(disable=["bound_static_cache"]).uuid(),
    }
    monkeypatch.setenv("MLA_OPS_DISABLE_PASSES", "fuse_attention,bound_static_cache")
    ids.add(MLAPass().uuid())
    monkeypatch.delenv("MLA_OPS_DISABLE_PASSES")
    monkeypatch.setattr(inductor, "fingerprint", lambda: "another source")
    ids.add(MLAPass().uuid())
    assert len(ids) == 6
    assert MLAPass().uuid() == MLAPass().uuid()


@torch.compiler.config.patch(cache_key_tag="mine")
def test_compile_caches_are_tagged_once() -> None:
    inductor.tag_caches()
    tag = torch.compiler.config.cache_key_tag
    assert tag == f"minemla_ops-{inductor.fingerprint()}"
    inductor.tag_caches()
    assert torch.compiler.config.cache_key_tag == tag


WARM = """
    import os
    import sys
    import torch
    os.environ["MLA_OPS_BACKEND"] = "tiled"
    sys.path.insert(0, {tests!r})
    from toys import Toy, inputs
    from mla_ops.kernels.tiled import TiledBackend
    from mla_ops.passes import MLAPass
    from torch._dynamo.utils import counters

    calls = []
    original = TiledBackend.mla_attention
    TiledBackend.mla_attention = lambda *args: calls.append(1) or original(*args)
    toy, args = Toy(), inputs()
    options = {{"pre_grad_custom_pass": MLAPass(disable={disable!r})}}
    with torch.no_grad():
        out = torch.compile(toy, options=options)(*args)
    torch.testing.assert_close(out, toy(*args), rtol=1e-5, atol=1e-6)
    hits = counters["inductor"]["fxgraph_cache_hit"]
    hits += counters["aot_autograd"]["autograd_cache_hit"]
    print(len(calls), "hit" if hits else "miss")
"""


def test_warm_cache_serves_no_other_options(tmp_path: Path) -> None:
    # Case 61: the second process finds the first one's graph, the third must not.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run(disable: list[str]) -> str:
        code = textwrap.dedent(WARM).format(tests=str(Path(__file__).parent), disable=disable)
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    assert run([]) == "1 miss"
    assert run([]) == "1 hit"
    assert run(["fuse_attention"]) == "0 miss"


# --- models of transformers ---


@torch.no_grad()
def test_model_with_inductor_writes_its_cache_in_place(counted: Counted) -> None:
    family = FAMILIES["deepseek_v3"]
    model, ids = family.build(), sample_input_ids(2, 9)
    cache, stock = (scenarios.static_cache(model, 2000) for _ in range(2))
    reports: list[RewriteReport] = []
    backend = make_backend(on_report=reports.append)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    scenarios.in_steps(model, ids[:, :6], cache, steps=(6,))
    expected = scenarios.in_steps(model, ids, stock, steps=(6, 1, 1, 1))[:, 6:]
    places = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    counted.calls = 0
    steps = [
        forward_logits(_Named(compiled, model), ids[:, i : i + 1], cache=cache) for i in (6, 7, 8)
    ]
    assert relative_error(torch.cat(steps, 1), expected) < 1e-5
    assert counted.calls == 3 * family.mla_layers
    assert places == [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        close(ours.keys[:, :, :9], theirs.keys[:, :, :9])
    assert [report.count("bound_static_cache") for report in reports] == [family.mla_layers]
    # Neither a copy of a layer's cache, nor a mask, nor keys of its length.
    step = functools.partial(compiled, input_ids=ids[:, -1:], cache=cache, use_cache=True)
    assert peak_bytes(step) < cache.layers[0].keys.nbytes // 10
    # Case 53, in part: the passes are a small share of a compile.
    assert set(reports[0].seconds) == {"fuse_attention", "bound_static_cache"}


class _Named(nn.Module):
    """A compiled model under the interface that the helpers expect."""

    def __init__(self, compiled: Any, model: nn.Module) -> None:
        super().__init__()
        self.model, self.run = model, compiled

    def forward(self, **kwargs: Any) -> Any:
        return self.run(**kwargs)


@pytest.mark.parametrize("how", ["backend", "pass"])
def test_generate_compiles_with_the_passes(how: str, counted: Counted) -> None:
    """`generate()` compiles its decode by itself, with its own mode."""
    from transformers import CompileConfig

    family = FAMILIES["deepseek_v3"]
    model, ids = family.build(), sample_input_ids(2, 6)
    options: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **options)
    backend = "mla_ops" if how == "backend" else "inductor"
    config = CompileConfig(backend=backend, fullgraph=True, mode="default")
    config._compile_all_devices = True
    hook = {"pre_grad_custom_pass": MLAPass()} if how == "pass" else {}
    with torch._inductor.config.patch(hook):
        actual = model.generate(
            ids, **options, cache_implementation="static", compile_config=config
        )
    assert torch.equal(actual, expected)
    assert counted.calls == 4 * family.mla_layers  # the prefill is not compiled


# --- training ---


def gradients(module: nn.Module, run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> list[Any]:
    """Loss, and gradients of parameters and inputs."""
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    module.zero_grad()
    loss = run(*leaves).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters()), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("module", [Toy, Eager])
def test_training_compile_has_the_gradients_of_stock(
    module: type[Toy], inner: str, counted: Counted
) -> None:
    # Case 51.
    toy, args = module(), inputs()
    compiled = torch.compile(toy, backend=make_backend(inner), fullgraph=True)
    for ours, stock in zip(gradients(toy, compiled, args), gradients(toy, toy, args), strict=True):
        close(ours, stock)
    assert counted.calls == 1


def test_nothing_of_the_size_of_the_scores_is_kept_for_the_backward() -> None:
    """The partitioner of AOTAutograd sees the op's own formula, which recomputes."""
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition

    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def inner(gm: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        partition = min_cut_rematerialization_partition
        return aot_function(gm.forward, keep, keep, partition_fn=partition)

    toy, args = Toy(), inputs(s=29, t=31)
    compiled = torch.compile(toy, backend=make_backend(inner), fullgraph=True)
    for ours, stock in zip(gradients(toy, compiled, args), gradients(toy, toy, args), strict=True):
        close(ours, stock)
    forward, backward = ([str(node.target) for node in gm.graph.nodes] for gm in graphs)
    assert forward.count("mla_ops.mla_attention.default") == 1
    assert backward.count("mla_ops.mla_attention_backward.default") == 1
    (output,) = (node for node in graphs[0].graph.nodes if node.op == "output")
    saved = [node.meta["val"].shape for node in output.all_input_nodes]
    assert not any({29, 31} <= set(shape) for shape in saved)


class Checkpointed(nn.Module):
    """Two layers whose activations are recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.down = Toy(), Eager(), nn.Linear(H * V, L)

    def forward(self, query: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            out = torch.utils.checkpoint.checkpoint(layer, query, latent, k_pe, use_reentrant=False)
            latent = self.down(out.transpose(1, 2).flatten(2))[:, None]
        return latent


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_checkpointed_layers_are_rewritten_in_their_subgraphs(inner: str) -> None:
    model, args, reports = Checkpointed(), inputs(4, 4), []
    backend = make_backend(inner, on_report=reports.append)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    pairs = zip(gradients(model, compiled, args), gradients(model, model, args), strict=True)
    for ours, stock in pairs:
        close(ours, stock)
    assert [len(report.matched) for report in reports] == [2]


def test_training_a_model_of_transformers() -> None:
    family = FAMILIES["deepseek_v3"]
    ids = sample_input_ids()

    def loss_and_gradients(compile_it: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model = family.build().train()
        old = getattr(model, "gradient_checkpointing_enable", None)  # until transformers 5.23
        getattr(model, "activation_checkpointing_enable", old)()
        run = torch.compile(model, backend=make_backend("aot_eager")) if compile_it else model
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    (loss, grads), (expected, stock) = loss_and_gradients(True), loss_and_gradients(False)
    close(loss, expected)
    assert grads.keys() == stock.keys()
    assert any("kv_b_proj" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, stock[name], rtol=2e-4, atol=1e-6, msg=name)


# --- adapters ---


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft's own call
def test_adapter_on_the_expansion_is_left_alone_and_right() -> None:
    # Case 63: an adapter elsewhere does not matter, one on kv_b_proj keeps stock code.
    peft = pytest.importorskip("peft")
    for target, fused in (("kv_b_proj", 0), ("o_proj", 2)):
        model = FAMILIES["deepseek_v3"].build()
        config = peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False)
        adapted, ids = peft.get_peft_model(model, config).eval(), sample_input_ids()
        expected = forward_logits(adapted, ids)
        reports: list[RewriteReport] = []
        torch._dynamo.reset()
        compiled = torch.compile(adapted, backend=make_backend("eager", on_report=reports.append))
        run = _Named(compiled, model)
        if fused:
            actual = forward_logits(run, ids)
        else:
            with pytest.warns(UserWarning, match=r"kv_b_proj is not a plain linear layer"):
                actual = forward_logits(run, ids)
        assert relative_error(actual, expected) < 1e-5
        assert sum(len(report.matched) for report in reports) == fused
