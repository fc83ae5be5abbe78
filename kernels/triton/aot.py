"""Compiling every kernel for GPUs that are not here, and what the compilers say about it.

A unit is one kernel as one call launches it, with one of the configurations that the table offers.
Registers and spills come from the compiled code; whether a spill is in the main loop, from its
disassembly: the main loop is the first one that multiplies matrices, the second one is the tail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_ops.errors import InvalidInputError
from mla_ops.kernels.triton.configs import ARCHS, Config, every_config
from mla_ops.kernels.triton.launch import Launch, recording
from mla_ops.kernels.triton.problems import PROBLEMS

__all__ = ["PROBLEMS", "Report", "Unit", "compile_unit", "compile_units", "units"]

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_MATRIX = re.compile(r"\b(HMMA|HGMMA|UTCHMMA|UTCMMA|v_mfma|v_smfmac)")
_PRODUCT = re.compile(r"\b(FFMA|v_(pk_)?fma_f32|v_(pk_)?fmac_f32)")  # of fp32, which has no units
_MANY_PRODUCTS = 64
# How disassemblies write a place and a jump to it.
_NVIDIA_PLACES = r"\s*(\.L_\w+):", r"\bBRA\b.*?`\((\.L_\w+)\)"
_AMD_PLACES = r"(\.LBB\w+):", r"\bs_c?branch\w*\s+(\.LBB\w+)"
_INT32_MAX = 2**31 - 1


class Unit(NamedTuple):
    """One compilation.

    Attributes:
        problem: name of the call.
        target: name of the architecture.
        number: which of the call's distinct launches.
        kernel: name of the kernel.
        config: its tile sizes, empty where it has none.
        variant: what else it was built for.
    """

    problem: str
    target: str
    number: int
    kernel: str
    config: str
    variant: str


class Report(NamedTuple):
    """What came of a unit.

    Attributes:
        unit: what was compiled.
        registers: per thread.
        spilled: bytes of registers kept in memory, per thread.
        in_loop: loads and stores of spilled registers within the main loop.
        shared: bytes of shared memory.
        limit: bytes that the target has.
        error: why it did not compile, or empty.
    """

    unit: Unit
    registers: int
    spilled: int
    in_loop: int
    shared: int
    limit: int
    error: str

    @property
    def faults(self) -> list[str]:
        """What is wrong, nothing when the kernel can be launched and its main loop is clean."""
        if self.error:
            return [self.error]
        found = []
        if self.in_loop:
            found.append(f"{self.in_loop} spills in the main loop")
        if self.shared > self.limit:
            found.append(f"shared memory {self.shared} > {self.limit}")
        return found


def _signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Return types, constants, and the names divisible by 16, as a launch would specialise them."""
    types, constants, divisible = {}, dict(launch.options), []
    for option in ("num_warps", "num_stages"):
        constants.pop(option, None)
    for parameter, value in zip(launch.kernel.params, launch.args, strict=False):
        name, special = parameter.name, not parameter.do_not_specialize
        if value is None:
            constants[name] = None
        elif isinstance(value, TensorDescriptor):
            types[name] = f"tensordesc<{_POINTERS[value.base.dtype][1:]}{value.block_shape}>"
        elif isinstance(value, torch.Tensor):
            types[name] = _POINTERS[value.dtype]
            divisible.append(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1 and special:
            constants[name] = 1
        else:
            types[name] = "i32" if abs(value) <= _INT32_MAX else "i64"
            if value % 16 == 0 and special:
                divisible.append(name)
    for name in constants:
        types[name] = "constexpr"
    return types, constants, divisible


def _launches(problem: str, target: str) -> list[tuple[str, Launch]]:
    """Return the distinct launches of a call, with what tells them apart."""
    with recording() as records, every_config(ARCHS[target]):
        PROBLEMS[problem]()
    found = {}
    for launch in records:
        types, constants, divisible = _signature(launch)
        options = {k: v for k, v in launch.options.items() if k.startswith("num_")}
        key = [launch.kernel.__name__, types, constants, sorted(divisible), options]
        found[json.dumps(key, sort_keys=True, default=str)] = launch
    return list(found.items())


def units(targets: Sequence[str], problems: Sequence[str] | None = None) -> Iterator[Unit]:
    """Yield every unit: what several calls have in common once.

    Args:
        targets: names in `ARCHS`.
        problems: names in `PROBLEMS`; None for all.

    Raises:
        InvalidInputError: a name is unknown.
    """
    for name, known in ((targets, ARCHS), (problems or (), PROBLEMS)):
        wrong = [n for n in name if n not in known]
        if wrong:
            raise InvalidInputError(f"expected some of {', '.join(known)}, got {', '.join(wrong)}")
    for target in targets:
        seen = set()
        for problem in problems or PROBLEMS:
            for index, (key, launch) in enumerate(_launches(problem, target)):
                if key in seen:
                    continue
                seen.add(key)
                options = launch.options
                config = ""
                if "BLOCK_M" in options:
                    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
                    tiles = Config(*(options[n] for n in names))
                    config = str(tiles._replace(tma=options.get("TMA", False)))
                flags = ("SPLIT", "CONTINUES", "FINAL", "FP8")
                variant = " ".join(n.lower() for n in flags if options.get(n))
                yield Unit(problem, target, index, launch.kernel.__name__, config, variant)


def _target(name: str) -> GPUTarget:
    if name.startswith("gfx"):
        return GPUTarget("hip", name, 64)
    return GPUTarget("cuda", int(name.removeprefix("sm")), 32)


def _tool(name: str) -> str:
    return str(Path(nvidia.__file__).parent / "bin" / name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _main_loop(listing: list[str], label: str, jump: str) -> range:
    """Return the lines of the first innermost loop that multiplies matrices.

    Args:
        listing: of a kernel.
        label: pattern of a line that names a place; its first group is the name.
        jump: pattern of a jump to a name.
    """
    found = ((line, re.match(label, text)) for line, text in enumerate(listing))
    places = {name[1]: line for line, name in found if name}
    ends = ((line, re.search(jump, text)) for line, text in enumerate(listing))
    jumps = [(line, name[1]) for line, name in ends if name]
    loops = [range(places[name], line) for line, name in jumps if places.get(name, line) < line]
    with_products = [loop for loop in loops if any(_MATRIX.search(listing[line]) for line in loop)]
    if not with_products:  # a kernel of fp32
        with_products = [
            loop
            for loop in loops
            if sum(bool(_PRODUCT.search(listing[line])) for line in loop) >= _MANY_PRODUCTS
        ]
    innermost = [
        loop
        for loop in with_products
        if not any(
            other != loop and other.start >= loop.start and other.stop <= loop.stop
            for other in with_products
        )
    ]
    return min(innermost, key=lambda loop: loop.start, default=range(0))


def _nvidia_report(code: bytes) -> tuple[int, int, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        usage = _run(_tool("cuobjdump"), "-res-usage", str(path))
        lines = _run(_tool("nvdisasm"), "-c", str(path)).splitlines()
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = (int(found[1]), int(found[2])) if found else (0, 0)
    loop = _main_loop(lines, *_NVIDIA_PLACES)
    return registers, stack, sum(bool(re.search(r"\b(STL|LDL)", lines[n])) for n in loop)


def _amd_report(text: str) -> tuple[int, int, int]:
    def count(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    lines = text.splitlines()
    loop = _main_loop(lines, *_AMD_PLACES)
    spills = sum(bool(re.search(r"\bscratch_|Folded (Spill|Reload)", lines[n])) for n in loop)
    return count("vgpr_count"), 4 * count("vgpr_spill_count"), spills


def compile_unit(unit: Unit) -> Report:
    """Compile one unit in this process.

    Args:
        unit: one of `units`.
    """
    _, launch = _launches(unit.problem, unit.target)[unit.number]
    types, constants, divisible = _signature(launch)
    names = [parameter.name for parameter in launch.kernel.params]
    source = ASTSource(
        fn=launch.kernel,
        signature={name: types[name] for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    target = _target(unit.target)
    options = {n: launch.options[n] for n in ("num_warps", "num_stages") if n in launch.options}
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        registers, spilled, in_loop = _amd_report(compiled.asm["amdgcn"])
    else:
        registers, spilled, in_loop = _nvidia_report(compiled.asm["cubin"])
    limit = ARCHS[unit.target].shared
    return Report(unit, registers, spilled, in_loop, compiled.metadata.shared, limit, "")


def compile_units(every: Sequence[Unit]) -> Iterator[Report]:
    """Compile units in a process of their own, which an aborting compiler may take down.

    Args:
        every: some of `units`.
    """
    left = list(every)
    while left:
        done = 0
        command = [sys.executable, "-c", f"import {__name__} as aot; aot.serve()"]
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as child:
            if child.stdin is None or child.stdout is None or child.stderr is None:
                raise InvalidInputError("expected pipes to the child process")
            child.stdin.write(json.dumps(left))
            child.stdin.close()
            for line in child.stdout:
                if line.startswith("@@"):
                    unit, *rest = json.loads(line[2:])
                    yield Report(Unit(*unit), *rest)
                    done += 1
            said = child.stderr.read().strip().splitlines()
        if done < len(left):
            reason = said[-1][:200] if said else f"the compiler ended with {child.returncode}"
            limit = ARCHS[left[done].target].shared
            yield Report(left[done], 0, 0, 0, 0, limit, reason)
            done += 1
        left = left[done:]


def serve() -> None:
    """Compile the units that come on standard input; one line of JSON for each on the output."""
    for unit in json.load(sys.stdin):
        report = compile_unit(Unit(*unit))
        print("@@" + json.dumps(report), flush=True)
