"""The matcher on small graphs: what is matched, what is left alone, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import (
    SCALE,
    B,
    Cat,
    Eager,
    H,
    L,
    Outer,
    P,
    Prefix,
    R,
    S,
    Sinks,
    T,
    Toy,
    V,
    check,
    compiled,
    inputs,
    with_bias,
)

from mla_ops.passes import make_backend
from mla_ops.passes.fuse_attention import ATTENTION
from mla_ops.passes.match import find_attention
from mla_ops.passes.nodes import kind


@torch.no_grad()  # autograd would refuse some of these writes by itself
def missed(module: nn.Module, *args: Any, **options: Any) -> str:
    """The reason why the one attention of a module was left alone; its result is untouched."""
    expected = module(*args)
    module = Outer(module)
    with pytest.warns(UserWarning, match="1 of 1 latent attentions of this graph were not rewr"):
        out, report, gm = compiled(module, *args, **options)
    assert torch.equal(out, expected)
    assert report.matched == []
    assert ATTENTION not in [n.target for n in gm.graph.nodes]
    (site,) = report.missed
    return site.reason


def bool_mask(heads: int = 1) -> Tensor:
    seen = torch.rand(B, heads, S, T, generator=torch.Generator().manual_seed(3)) > 0.4
    seen[..., 0] = True
    return seen


def float_mask() -> Tensor:
    return torch.zeros(B, 1, S, T).masked_fill(~bool_mask(), torch.finfo(torch.float32).min)


# --- forms ---


class SetItem(Toy):
    def join(self, kv: Tensor, k_nope: Tensor, k_pe: Tensor) -> Tensor:
        key = kv.new_empty(*kv.shape[:-1], P + R)
        key[..., :P] = k_nope
        key[:, :, :, P:] = k_pe
        return key


class RotaryFirst(Toy):
    """The writes in the other order."""

    def join(self, kv: Tensor, k_nope: Tensor, k_pe: Tensor) -> Tensor:
        key = kv.new_empty(*kv.shape[:-1], P + R)
        key[..., P:].copy_(k_pe)
        key[..., :P].copy_(k_nope)
        return key


class Flat(Toy):
    """A latent without a dimension for its head."""

    def project(self, latent: Tensor) -> Tensor:
        return self.kv_b_proj(latent[:, 0])


class Divided(Eager):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.softmax(query @ key.transpose(-1, -2) / 3.0, -1) @ value


@pytest.mark.parametrize(
    "module", [Toy, Eager, Cat, SetItem, RotaryFirst, Flat, Divided, Sinks, Prefix]
)
def test_every_form_is_matched(module: type[Toy]) -> None:
    # Case 58: eager and sdpa; case 55: keys built by cat and by copies.
    check(module(), *inputs())


@pytest.mark.parametrize("module", [Toy, Eager])
@pytest.mark.parametrize("s", [1, S])
@pytest.mark.parametrize("r", [0, R])
def test_one_token_and_no_rotary_part(module: type[Toy], s: int, r: int) -> None:
    check(module(), *inputs(s=s, r=r))


class Sharded(Toy):
    """The weight is what some function makes of a parameter, as `to_local` of a sharded one."""

    def project(self, latent: Tensor) -> Tensor:
        return F.linear(latent, self.kv_b_proj.weight.view_as(self.kv_b_proj.weight))


def test_weight_may_come_from_any_node() -> None:
    check(Sharded(), *inputs())


@pytest.mark.parametrize("mask", [bool_mask(), bool_mask(H), float_mask(), bool_mask()[0, 0]])
def test_masks(mask: Tensor) -> None:
    check(Toy(), *inputs(), mask)
    if mask.is_floating_point():
        check(Eager(), *inputs(), mask)


def test_a_prefix_of_any_length() -> None:
    check(Prefix(), *inputs(), dynamic=True)


def test_default_scale_is_that_of_the_query() -> None:
    class Plain(Toy):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value)

    _, gm = check(Plain(), *inputs())
    (op,) = [n for n in gm.graph.nodes if n.target is ATTENTION]
    assert op.args[7] == (P + R) ** -0.5


def test_causal_over_as_many_keys_as_queries() -> None:
    class Causal(Toy):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE)

    check(Causal(), *inputs(s=T))
    check(Causal(), *inputs(s=T), dynamic=True)
    reason = "is_causal where S and T may differ: torch aligns it at the first key"
    assert missed(Causal(), *inputs()) == reason  # top left there, bottom right here


def test_dynamic_batch_and_length() -> None:
    # Case 59.
    module, compiles = Toy(), []
    backend = make_backend("eager", on_report=compiles.append)
    torch._dynamo.reset()
    dynamic = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for s, t in ((4, 6), (5, 9), (3, 7)):
        args = inputs(s, t)
        torch.testing.assert_close(dynamic(*args), module(*args), rtol=1e-5, atol=1e-6)
    assert 1 <= len(compiles) <= 2
    assert all(len(report.matched) == 1 for report in compiles)


def test_two_back_to_back_where_one_feeds_the_other() -> None:
    # Case 59: the output of the first is the latent of the second.
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Toy(), Eager()
            self.down = nn.Linear(H * V, L)

        def forward(self, query: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
            out = self.one(query, latent, k_pe).transpose(1, 2).flatten(2)
            return self.two(query, self.down(out)[:, None], k_pe)

    module, args = Two(), inputs(s=T)
    out, report, _ = compiled(module, *args)
    torch.testing.assert_close(out, module(*args), rtol=1e-5, atol=1e-6)
    assert [site.path for site in report.matched] == ["one", "two"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_that_is_cut_to_the_length_of_the_key(dynamic: bool) -> None:
    """The key is asked for its size, which another tensor has as well."""

    class Cut(Eager):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            assert mask is not None
            mask = mask[..., : key.shape[-2]] + key.size(1) - key.shape[3]
            return super().attend(query, key, value, mask)

    check(Cut(), *inputs(), F.pad(float_mask(), (0, 5)), dynamic=dynamic)


def test_an_expansion_that_is_used_elsewhere_stays() -> None:
    class Watched(Toy):
        def forward(self, query: Tensor, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
            kv = self.kv_b_proj(latent)
            heads = kv.view(B, latent.shape[2], -1, P + V).transpose(1, 2)
            k_nope, value = heads.split([P, V], dim=-1)
            key = self.join(heads, k_nope, k_pe.expand(-1, H, -1, -1))
            return self.attend(query, key, value, None), kv

    module, args = Watched(), inputs()
    out, report, gm = compiled(module, *args)
    for one, other in zip(out, module(*args), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert len(report.matched) == 1
    assert "linear" in map(kind, gm.graph.nodes)


# --- left alone, with the reason ---


class Twice(Toy):
    """An adapter's output is added: the weight alone is not the layer."""

    def project(self, latent: Tensor) -> Tensor:
        return (
            self.kv_b_proj(latent)
            + 0.1 * latent.repeat(1, 1, 1, H * (P + V) // L + 1)[..., : H * (P + V)]
        )


class Scaled(Toy):
    """A dequantized weight in another form than one linear."""

    def project(self, latent: Tensor) -> Tensor:
        return self.kv_b_proj(latent) * 2.0


class KeyReturned(Toy):
    def forward(self, *args: Any) -> Any:
        key, value = self.expand_kv(*args[1:])
        return self.attend(args[0], key, value, None) + key.sum()


class OwnRotary(Toy):
    """Every head has a rotary part of its own."""

    def expand_kv(self, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        return super().expand_kv(latent, k_pe.repeat(1, H, 1, 1))


class Written(Toy):
    """The cache is written to between expansion and attention."""

    def forward(self, query: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
        latent = latent.clone()
        key, value = self.expand_kv(latent, k_pe)
        latent.add_(1.0)
        return self.attend(query, key, value, None) + latent.sum()


class InPlace(Toy):
    """An adapter that writes into the layer's output, which no edge of the graph shows."""

    def project(self, latent: Tensor) -> Tensor:
        kv = self.kv_b_proj(latent)
        kv.mul_(2.0)
        return kv


class ValueInPlace(Toy):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        value[..., :2].mul_(2.0)
        return super().attend(query, key, value, mask)


class KeyInPlace(Toy):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        key.mul_(2.0)
        return super().attend(query, key, value, mask)


class Grouped(Toy):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, scale=SCALE, enable_gqa=True)


class OneSided(Toy):
    """Key and value are cut at different places."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key[:, :, :3], value[:, :, 1:4], scale=SCALE)


class TensorScale(Eager):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scale = query.mean().exp()
        return F.softmax(query @ key.transpose(2, 3) * scale, -1) @ value


class ProbsReturned(Eager):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        probs = F.softmax(query @ key.transpose(2, 3) * SCALE, -1)
        return probs @ value + probs.sum()


def with_dropout(module: type[Toy] = Toy) -> Toy:
    toy = module()
    toy.dropout = 1e-30  # too small to drop anything, so that the result can be compared
    return toy


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (with_bias, "kv_b_proj has a bias"),
        (with_dropout, "it uses dropout"),
        (lambda: with_dropout(Eager), "it uses dropout"),
        (Twice, "kv_b_proj is not a plain linear layer (it is the result of add)"),
        (Scaled, "kv_b_proj is not a plain linear layer (it is the result of mul)"),
        (KeyReturned, "the key is used elsewhere, too (sum_1)"),
        (OwnRotary, "the second part of the key is not shared by the heads"),
        (Written, "the latent is written to in front of the attention"),
        (InPlace, "what was expanded is written to in front of the attention"),
        (ValueInPlace, "what was expanded is written to in front of the attention"),
        (KeyInPlace, "the key is used elsewhere, too (mul_)"),
        (Grouped, "it shares key heads (enable_gqa)"),
        (OneSided, "key and value are cut at different tokens"),
        (TensorScale, "its scale is no constant"),
    ],
)
def test_left_alone(module: Callable[[], Toy], reason: str) -> None:
    # Cases 58, 62 and 63: adapters and quantized layers are no plain linear, so nothing is read.
    assert missed(module(), *inputs()) == reason


def test_probabilities_that_are_returned_keep_the_attention() -> None:
    # The anchor is gone then: nothing says that this softmax was an attention's.
    out, report, _ = compiled(ProbsReturned(), *inputs())
    assert torch.equal(out, ProbsReturned()(*inputs()))
    assert report.matched == []


def test_dropout_that_is_off_does_not_matter() -> None:
    check(with_dropout(Eager).eval(), *inputs())


def test_mask_with_a_gradient_is_left_alone() -> None:
    mask = float_mask().requires_grad_()
    assert missed(Toy(), *inputs(), mask) == "its mask needs a gradient"


def test_a_miss_is_seen_without_the_class() -> None:
    """Remote code has no `expand_kv`: the key that is put together tells."""
    toy = with_dropout()

    def forward(*args: Tensor) -> Tensor:
        kv = F.linear(args[1], toy.kv_b_proj.weight).view(B, T, -1, P + V).transpose(1, 2)
        k_nope, value = kv.split([P, V], dim=-1)
        key = torch.cat((k_nope, args[2].expand(-1, H, -1, -1)), dim=-1)
        return F.scaled_dot_product_attention(args[0], key, value, dropout_p=1e-30)

    with pytest.warns(UserWarning, match="it uses dropout"):
        compiled(forward, *inputs())


def test_other_attention_is_no_miss() -> None:
    """A vision tower's attention is reported, but nobody expects it to be rewritten."""

    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    q, k, v = (torch.randn(B, H, S, V) for _ in range(3))
    out, report, _ = compiled(Plain(), q, k, v)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    (site,) = report.sites
    assert (site.matched, site.expected, report.missed) == (False, False, [])
    assert site.reason == "the value is not the second piece of a split (it is a graph input)"
    router = torch.fx.symbolic_trace(lambda x: F.softmax(x, -1).topk(2))
    assert find_attention(router.graph) == []


@torch.no_grad()
def test_flex_attention_is_reported() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(Toy):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return flex_attention(query, key, value, scale=SCALE)

    with pytest.warns(UserWarning, match="FlexAttention keeps its mask in a block mask"):
        _, report, _ = compiled(Outer(Flex()), *inputs())
    assert report.matched == []


def test_flash_kernel_is_reported() -> None:
    with torch.library._scoped_library("flash_attn", "FRAGMENT") as library:
        library.define("_toy_forward(Tensor q, Tensor k, Tensor v) -> Tensor")
        library.impl("_toy_forward", F.scaled_dot_product_attention, "CompositeExplicitAutograd")
        torch.library.register_fake(
            "flash_attn::_toy_forward",
            lambda q, k, v: q.new_empty((*q.shape[:3], v.shape[3])),
            lib=library,
        )

        class Flash(Toy):
            def attend(self, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
                return torch.ops.flash_attn._toy_forward(query, key, value)

        with pytest.warns(UserWarning, match="a flash-attention kernel pads the values"):
            _, report, _ = compiled(Outer(Flash()), *inputs())
    assert report.matched == []
