"""Tile sizes: a table by rows, shared memory, block size and dtype, and how to choose from it.

The first entry that fits is taken, so that a call runs the same tiles on every machine of a kind
and with every batch. With `MLA_OPS_AUTOTUNE=1` the entries that fit are timed once per kind of
call instead. The entries are those that `mla-ops compile-kernels` has seen compile without a spill
in a main loop; the choice may differ between versions of Triton, the code does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton

from mla_ops import env

__all__ = [
    "ARCHS",
    "Arch",
    "Config",
    "Expansion",
    "absorbed_configs",
    "arch_of",
    "backward_configs",
    "block_ids",
    "every_config",
    "expanded_configs",
    "override",
    "padded",
    "run_chosen",
]

VERSION: tuple[int, ...] = tuple(int(part) for part in triton.__version__.split(".")[:2])


class Config(NamedTuple):
    """Tile sizes of one kernel.

    Attributes:
        block_m: rows per program.
        block_n: keys per tile.
        num_warps: warps per program.
        num_stages: tiles in flight, and one.
        tma: whether tiles that are not masked are loaded by tensor descriptors.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False

    def __str__(self) -> str:
        """Write it as the tables do."""
        tiles = f"{self.block_m}x{self.block_n} w{self.num_warps} st{self.num_stages}"
        return f"{tiles} tma" if self.tma else tiles

    def options(self) -> dict[str, int]:
        """Return it as options of a launch, those that every kernel has."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


class Arch(NamedTuple):
    """What of a GPU the choice depends on.

    Attributes:
        name: `sm90`, `gfx942`, and so on; `interpreter` for CPU tensors.
        shared: bytes of shared memory that one program may use.
        processors: how many programs run at once, at least.
    """

    name: str
    shared: int
    processors: int

    @property
    def is_hip(self) -> bool:
        """Whether it is one of AMD's."""
        return self.name.startswith("gfx")

    @property
    def has_descriptors(self) -> bool:
        """Whether tensor descriptors (TMA) pay; the interpreter plays that it has them."""
        return self.name in _DESCRIBED


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm80", 166_912, 108),
        Arch("sm86", 101_376, 84),
        Arch("sm89", 101_376, 128),
        Arch("sm90", 232_448, 132),
        Arch("sm100", 232_448, 148),
        Arch("sm120", 101_376, 170),
        Arch("gfx942", 65_536, 304),
        Arch("gfx950", 163_840, 256),
    )
}
"""The targets of ahead-of-time compilation."""

_INTERPRETER = Arch("interpreter", 232_448, 4)
_TUNED: dict[object, Config] = {}
_forced: dict[str, Config] = {}
_forced_arch: list[Arch] = []


@functools.cache
def _arch_of(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        name = properties.gcnArchName.partition(":")[0]
        shared = ARCHS[name].shared if name in ARCHS else 65_536
    else:
        name = f"sm{properties.major}{properties.minor}"
        shared = getattr(properties, "shared_memory_per_block_optin", 49_152)
    return Arch(name, shared, properties.multi_processor_count)


def arch_of(tensor: torch.Tensor) -> Arch:
    """Return what is known of the device of a tensor.

    Args:
        tensor: on a GPU, or on the CPU in the interpreter.
    """
    if tensor.is_cuda:
        return _arch_of(tensor.get_device())
    return _forced_arch[-1] if _forced_arch else _INTERPRETER


def padded(width: int) -> int:
    """Return the power of two, at least 16, that a tile of this width takes."""
    return max(16, 1 << (width - 1).bit_length())


def block_ids(block_size: int, block_n: int) -> int:
    """Return how many block ids a tile of keys has; -1 when every key looks up its own."""
    if block_size % block_n == 0:
        return 1
    if block_n % block_size == 0 and block_n // block_size in (2, 4):
        return block_n // block_size
    return -1


_ABSORBED: dict[int, tuple[Config, ...]] = {
    16: (Config(16, 32, 4, 3), Config(16, 64, 8, 2), Config(16, 32, 4, 2), Config(16, 16, 4, 2)),
    32: (Config(32, 64, 8, 2), Config(32, 32, 8, 2), Config(32, 16, 4, 2)),
    64: (Config(64, 32, 8, 3), Config(64, 32, 8, 2)),
}
_ABSORBED_HIP: dict[int, tuple[Config, ...]] = {
    16: (Config(16, 32, 4, 1), Config(16, 16, 4, 1)),
    32: (Config(32, 16, 4, 1), Config(16, 16, 4, 1)),
}
_EXPANDED: tuple[Config, ...] = (
    Config(128, 64, 8, 2),
    Config(128, 32, 8, 2),
    Config(64, 64, 4, 2),
    Config(64, 32, 4, 2),
    Config(32, 32, 4, 2),
)
_EXPANDED_TMA: tuple[Config, ...] = (Config(128, 128, 8, 2, True), Config(128, 64, 8, 3, True))
_EXPANDED_WIDE = (Config(128, 32, 8, 2), Config(64, 32, 8, 2), Config(32, 32, 8, 2))
_EXPANDED_WIDE_TMA = (Config(128, 32, 8, 2, True), Config(64, 32, 8, 2, True))
_EXPANDED_FP32 = (Config(32, 16, 8, 2), Config(16, 16, 8, 1))
_EXPANDED_HIP: tuple[Config, ...] = (Config(128, 32, 4, 1), Config(64, 32, 4, 1))
_BACKWARD: tuple[Config, ...] = (Config(32, 32, 4, 2),)
_BACKWARD_LARGE = (Config(64, 64, 8, 2), Config(32, 64, 8, 2))
_BACKWARD_WIDE = (Config(32, 32, 8, 2),)
_BACKWARD_FP32 = (Config(16, 16, 8, 2),)
_BACKWARD_HIP = (Config(32, 32, 4, 1), Config(16, 16, 4, 1))
_FEW_ROWS = Config(16, 16, 4, 1)
_OFFERS = 2
_LARGE = ("sm90", "sm100")
# sm120 has descriptors too; they save little there, and with Triton 3.6 spill in the main loop.
_DESCRIBED = (*_LARGE, "interpreter")
_MODERN = ("sm90", "sm100", "sm120")
_MASKED_80 = Config(128, 32, 8, 2)
_MASKED = Config(32, 32, 8, 2)
# Where 64 rows leave no spill in the main loop; elsewhere two programs take 32 rows each.
_WIDE = ("sm90",)


def _fitting(
    table: tuple[Config, ...], arch: Arch, bytes_per_key: int, bytes_per_row: int
) -> list[Config]:
    """Return the entries whose tiles fit into shared memory."""

    def need(config: Config) -> int:
        tiles = max(1, config.num_stages - 1)
        return config.block_n * bytes_per_key * tiles + config.block_m * bytes_per_row

    return [config for config in table if need(config) <= arch.shared]


@functools.cache
def absorbed_configs(
    rows: int, latent: int, rope: int, itemsize: int, fp8: bool, masked: bool, arch: Arch
) -> list[Config]:
    """Return the tile sizes offered for the absorbed form, best first.

    Args:
        rows: query tokens times heads of a request.
        latent: L.
        rope: R.
        itemsize: bytes of an element of the query.
        fp8: whether the cache holds fp8.
        masked: whether there is an attention mask, whose tiles take memory too.
        arch: of the device.
    """
    table = _ABSORBED_HIP if arch.is_hip else _ABSORBED
    bucket = 16 if rows <= 16 else 32
    if rows > 32 and arch.name in _WIDE and VERSION < (3, 9) and not fp8:
        bucket = 64
    width = padded(latent) + (padded(rope) if rope else 0)
    offered = _fitting(table[bucket], arch, width * itemsize, width * itemsize)
    if fp8 and not arch.is_hip:  # codes and what they become are in registers together
        narrow = 16 if arch.name in _MODERN else 0  # rows that four warps can take
        offered = [c for c in offered if c.block_m * c.block_n <= 32 * 32]
        offered = [c for c in offered if c.num_warps == 8 or c.block_m <= narrow]
    if masked:
        offered = [c for c in offered if c.block_n <= 32][:1]
    if itemsize > 2:  # products of fp32 take no matrix units, and twice the registers
        offered = [c for c in offered if c.block_m * c.block_n * padded(latent) <= 16 * 16 * 512]
    return offered[:_OFFERS] or [_FEW_ROWS]


class Expansion(NamedTuple):
    """What of a call the tiles of the expanded form and of its backward depend on.

    Attributes:
        nope: P.
        rope: R.
        value: V.
        itemsize: bytes of an element.
        masked: whether there is an attention mask.
        tma: whether tensor descriptors can be made of keys and values.
    """

    nope: int
    rope: int
    value: int
    itemsize: int
    masked: bool
    tma: bool = False

    @property
    def query_width(self) -> int:
        """Columns of the tiles of both parts of queries, or of keys."""
        return sum(padded(width) for width in (self.nope, self.rope) if width)

    @property
    def is_wide(self) -> bool:
        """Whether the result alone takes half of the registers."""
        return padded(self.value) > 128


@functools.cache
def expanded_configs(given: Expansion, arch: Arch) -> list[Config]:
    """Return the tile sizes offered for the expanded form, best first.

    Those with tensor descriptors come first, and then those without.

    Args:
        given: widths, dtype and mask.
        arch: of the device.
    """
    large = arch.name in _LARGE
    table, described = _EXPANDED, _EXPANDED_TMA
    if given.itemsize > 2:
        table, described = _EXPANDED_FP32, ()
    elif arch.is_hip:
        table, described = _EXPANDED_HIP, ()
    elif given.is_wide:
        table, described = _EXPANDED_WIDE[not large :], _EXPANDED_WIDE_TMA
    elif given.masked and not large:
        table = (_MASKED_80 if arch.name == "sm80" else _MASKED,)
    per_row = given.query_width * given.itemsize
    per_key = per_row + padded(given.value) * given.itemsize
    offered = _fitting(table, arch, per_key, per_row)[:_OFFERS] or [_FEW_ROWS]
    if not given.tma:
        return offered
    return _fitting(described, arch, per_key, per_row)[:_OFFERS] + offered


@functools.cache
def backward_configs(given: Expansion, arch: Arch) -> list[Config]:
    """Return the tile sizes offered for the two kernels of the backward, best first.

    Args:
        given: widths, dtype and mask.
        arch: of the device.
    """
    table = _BACKWARD_LARGE if arch.name in _LARGE and not given.masked else _BACKWARD
    if given.is_wide:
        table = _BACKWARD_WIDE
    if given.itemsize > 2:
        table = _BACKWARD_FP32
    if arch.is_hip:
        table = _BACKWARD_HIP
    width = (given.query_width + padded(given.value)) * given.itemsize
    return _fitting(table, arch, width, width)[:_OFFERS] or [_FEW_ROWS]


@contextmanager
def override(kind: str, config: Config) -> Iterator[None]:
    """Use one configuration for every kernel of a kind, for tests and measurements.

    Args:
        kind: `absorbed`, `expanded`, `backward_keys` or `backward_queries`.
        config: the tile sizes.
    """
    _forced[kind] = config
    try:
        yield
    finally:
        del _forced[kind]


@contextmanager
def every_config(arch: Arch) -> Iterator[None]:
    """Run calls as on a device of this kind, with every configuration that it is offered.

    Args:
        arch: of the device.
    """
    _forced_arch.append(arch)
    try:
        yield
    finally:
        _forced_arch.pop()


def run_chosen(
    kind: str,
    key: Callable[[], object],
    offered: list[Config],
    run: Callable[[Config], None],
    repeatable: bool,
) -> None:
    """Run a call with the tile sizes chosen for it.

    Args:
        kind: as for `override`.
        key: returns what the choice may depend on, hashable; lengths are no part of it.
        offered: what fits, best first.
        run: launches the kernel.
        repeatable: whether that gives the same result a second time; if so, the offers are timed
            when `MLA_OPS_AUTOTUNE=1`, unless a graph is being captured.
    """
    if kind in _forced:
        run(_forced[kind])
    elif _forced_arch:
        for config in offered:
            run(config)
    elif len(offered) > 1 and repeatable and env.autotune():
        run(_tuned(kind, key, offered, run))
    else:
        run(offered[0])


def _tuned(
    kind: str, key: Callable[[], object], offered: list[Config], run: Callable[[Config], None]
) -> Config:
    of_call = kind, key()
    found = _TUNED.get(of_call)
    if found is None:
        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return offered[0]
        times = {c: float(triton.testing.do_bench(functools.partial(run, c))) for c in offered}
        found = _TUNED[of_call] = min(times, key=lambda config: times[config])
    return found
