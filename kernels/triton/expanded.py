"""The expanded form on the host: keys and values as the kernels take them, and what is launched."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_ops import env
from mla_ops.kernels.triton.absorbed import Rules
from mla_ops.kernels.triton.configs import (
    Config,
    Expansion,
    arch_of,
    expanded_configs,
    padded,
    run_chosen,
)
from mla_ops.kernels.triton.launch import cdiv, launch
from mla_ops.kernels.triton.prefill import mla_expanded_kernel

__all__ = ["Expanded", "State", "attend_expanded", "width_constants"]


class Expanded(NamedTuple):
    """Queries, keys and values of a call: dense with a batch dimension, or ragged without.

    Attributes:
        query: `[B, H, S, P+R]`, or ragged `[T, H, P+R]`.
        key: `[B, K, H, P]`, or `[K, H, P]`: some of the keys.
        rope: `[B, K, R]`, or `[K, R]`.
        value: `[B, K, H, V]`, or `[K, H, V]`.
        cu_q: `[requests + 1]` int32 where ragged.
        cu_k: `[requests + 1]` int32 where ragged.
        first_token: what to subtract from `cu_q`.
        key_begin: place of the first of the keys, where dense.
        num_keys: how many keys there are in all, where dense.
    """

    query: Tensor
    key: Tensor
    rope: Tensor
    value: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    first_token: int = 0
    key_begin: int = 0
    num_keys: int = 0

    def key_strides(self) -> tuple[int, ...]:
        """Return strides: batch, head, token of keys; batch, token of rotary keys; of values."""
        key, rope, value = self.key.stride(), self.rope.stride(), self.value.stride()
        if self.cu_q is not None:
            return 0, key[1], key[0], 0, rope[0], 0, value[1], value[0]
        return key[0], key[2], key[1], rope[0], rope[1], value[0], value[2], value[1]

    def takes_descriptors(self) -> bool:
        """Whether tensor descriptors can be made of keys and values: all is in steps of 16 bytes.

        A dimension that is repeated, whose stride is 0, is left to pointers.
        """
        places = strides = 0
        for part in self[1:4]:
            if part.shape[-1]:
                outer = part.stride()[:-1]
                if 0 in outer:
                    return False
                places |= part.data_ptr()
                for stride in outer:
                    strides |= stride
        aligned = not places % 16 and not strides * self.value.element_size() % 16
        return aligned and self.value.shape[-3] > 0

    def descriptors(self, block_n: int) -> list[TensorDescriptor | None]:
        """Return descriptors of keys, rotary keys and values, each of `[B, H, K, width]`.

        Args:
            block_n: keys per tile.
        """
        batch = 1 if self.cu_q is not None else self.key.shape[0]
        keys, heads = self.key.shape[-3:-1]
        k_b, k_h, k_t, rope_b, rope_t, v_b, v_h, v_t = self.key_strides()
        return [
            _descriptor(self.key, (batch, heads, keys), (k_b, k_h, k_t), block_n),
            _descriptor(self.rope, (batch, 1, keys), (rope_b, 0, rope_t), block_n),
            _descriptor(self.value, (batch, heads, keys), (v_b, v_h, v_t), block_n),
        ]


def _descriptor(
    part: Tensor, sizes: tuple[int, int, int], strides: tuple[int, int, int], block_n: int
) -> TensorDescriptor | None:
    """Describe tiles of keys of one request and head, or nothing where a part has no width."""
    width = part.shape[-1]
    if not width:
        return None
    of_request, of_head, of_token = strides
    # Without the constructor, whose checks `takes_descriptors` has made: they take microseconds.
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape = part, [*sizes, width]
    # The stride of a single element is never used, but must be one that could be.
    made.strides = [of_request or of_token, of_head or of_token, of_token, 1]
    made.block_shape = [1, 1, block_n, padded(width)]
    return made


@functools.cache
def width_constants(heads: int, nope: int, rope: int, value: int) -> dict[str, int]:
    """Return the constants of the kernels of the expanded form that follow from widths.

    Args:
        heads: H.
        nope: P.
        rope: R.
        value: V.
    """
    sizes = {"P": nope, "R": rope, "V": value}
    return {"H": heads, **sizes, **{f"BLOCK_{name}": padded(size) for name, size in sizes.items()}}


class State(NamedTuple):
    """A softmax between two launches.

    Attributes:
        acc: `[H, T, V]` fp32, unnormalised.
        stats: `[2, H, T]` fp32: maximum and sum.
    """

    acc: Tensor
    stats: Tensor

    @classmethod
    def empty(cls, heads: int, tokens: int, width: int, like: Tensor) -> State:
        """Return the state of rows that have seen no key."""
        acc = torch.zeros((heads, tokens, width), dtype=torch.float32, device=like.device)
        stats = torch.zeros((2, heads, tokens), dtype=torch.float32, device=like.device)
        stats[0].fill_(float("-inf"))
        return cls(acc, stats)


def attend_expanded(
    given: Expanded,
    rules: Rules,
    out: Tensor | None,
    lse: Tensor | None,
    state: State | None,
) -> None:
    """Attend to keys and values that are expanded.

    Where it is ragged, `out` and `lse` are written for every token: 0 and -inf behind the last
    request.

    Args:
        given: queries, keys and values.
        rules: who sees whom.
        out: laid out like the query, written; None: more keys will follow, `state` is written.
        lse: `[B, H, S]`, or ragged `[H, T]`; written with `out`.
        state: what earlier launches have left, or None.
    """
    query, key, rope, value = given[:4]
    heads, width = value.shape[-2:]
    widths = key.shape[-1], rope.shape[-1], width
    arch, masked = arch_of(query), rules.mask is not None
    tma = not masked and arch.has_descriptors and given.takes_descriptors() and env.tma()
    sizes = Expansion(*widths, query.element_size(), masked, tma)
    offered = expanded_configs(sizes, arch)

    def run(config: Config) -> None:
        if config.tma and not tma:  # `override` is for all calls, also for those without
            config = config._replace(tma=False)
        _launch_expanded(given, rules, config, out, lse, state)

    def name() -> object:
        return sizes, heads, query.dtype, arch, rules.is_causal, rules.mask_kind

    run_chosen("expanded", name, offered, run, state is None)


def _launch_expanded(
    given: Expanded,
    rules: Rules,
    config: Config,
    out: Tensor | None,
    lse: Tensor | None,
    state: State | None,
) -> None:
    query, key, rope, value, cu_q, cu_k = given[:6]
    heads, width = value.shape[-2:]
    strides, of_out = query.stride(), (0, 0, 0, 0) if out is None else out.stride()
    if cu_q is not None:
        tokens, requests, most = query.shape[0], cu_q.shape[0] - 1, 0
        blocks = tokens // config.block_m + requests + 1
        strides, of_out = (0, strides[1], strides[0]), (0, of_out[1], of_out[0])
    else:
        requests, _, most, _ = query.shape
        tokens = requests * most
        blocks = requests * cdiv(most, config.block_m)
    of_lse = (0, 0, 0) if lse is None else lse.stride()
    launch(
        mla_expanded_kernel,
        (blocks, heads),
        query,
        query,
        key,
        rope,
        value,
        *(given.descriptors(config.block_n) if config.tma else (None, None, None)),
        query if out is None else out,
        query if lse is None else lse,
        query if state is None else state.acc,
        query if state is None else state.stats,
        query if cu_q is None else cu_q,
        query if cu_k is None else cu_k,
        query if rules.mask is None else rules.mask,
        query if rules.bounds is None else rules.bounds,
        query if rules.sinks is None else rules.sinks,
        rules.scale,
        tokens,
        requests,
        most,
        given.num_keys,
        given.key_begin,
        given.key_begin + key.shape[-3],
        given.first_token,
        *strides[:3],
        *given.key_strides(),
        *of_out[:3],
        0 if cu_q is not None else of_lse[0],
        of_lse[-2],
        *rules.mask_strides(),
        **width_constants(heads, key.shape[-1], rope.shape[-1], width),
        RAGGED=cu_q is not None,
        CAUSAL=rules.is_causal,
        MASK=rules.mask_kind,
        BOUNDS=rules.bounds is not None,
        SINKS=rules.sinks is not None and out is not None,
        CONTINUES=state is not None,
        FINAL=out is not None,
        TMA=config.tma,
        **config.options(),
    )
