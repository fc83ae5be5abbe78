"""The passes as a custom pass of Inductor, and what compile caches must know of them."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterable

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from mla_ops import env, errors
from mla_ops.passes.pipeline import check_names, rewrite
from mla_ops.passes.report import RewriteReport

__all__ = ["MLAPass", "fingerprint", "tag_caches"]


@functools.cache
def fingerprint() -> str:
    """Return a hash of all code that a compiled graph depends on: passes, ops and their rules.

    Neither Inductor's nor AOTAutograd's cache looks at the schema, the fake rule or the gradient of
    a custom op (pytorch#160472): without this an upgraded package would run stale graphs.
    """
    root = pathlib.Path(errors.__file__).parent
    files = [
        *pathlib.Path(__file__).parent.glob("*.py"),
        *root.glob("*.py"),
        *root.glob("ops/*.py"),
    ]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def tag_caches() -> None:
    """Make every compile cache of this process depend on `fingerprint`; asking twice is harmless.

    The tag stays: a backward graph is compiled, and looked up, after the forward has returned.
    """
    tag = f"mla_ops-{fingerprint()}"
    config = torch.compiler.config
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag}{tag}"


class MLAPass(CustomGraphPass):
    """The passes for plain Inductor: `options={"pre_grad_custom_pass": MLAPass()}`.

    Also as `torch._inductor.config.pre_grad_custom_pass`, which reaches the compile that
    `generate()` does by itself.

    Args:
        disable: names of passes that do not run.
        strict: raise when an attention that looks like latent attention was left alone.
        on_report: called with the report of every graph. A graph that comes out of a compile cache
            is not rewritten again and gives no report.

    Raises:
        InvalidInputError: `disable` names no pass.

    Example:
        >>> from mla_ops.passes import MLAPass
        >>> MLAPass().uuid() == MLAPass(disable=["bound_static_cache"]).uuid()
        False
    """

    def __init__(
        self,
        *,
        disable: Iterable[str] = (),
        strict: bool = False,
        on_report: Callable[[RewriteReport], object] | None = None,
    ) -> None:
        self.disable = check_names(disable)
        self.strict = strict
        self.on_report = on_report

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph that Inductor got from Dynamo.

        Args:
            graph: changed in place; its submodules are found through its owner.

        Raises:
            RewriteError: as `rewrite` does under `strict`.
        """
        tag_caches()
        owner = graph.owning_module or GraphModule(torch.nn.Module(), graph)
        report = rewrite(owner, disable=self.disable, strict=self.strict)
        if self.on_report is not None:
            self.on_report(report)

    def uuid(self) -> str:
        """Return what Inductor's cache keys on: the source code and every option."""
        disabled = sorted({*self.disable, *env.disabled_passes()})
        return f"{fingerprint()}-{self.strict}-{','.join(disabled)}"

    def __reduce__(self) -> tuple[type[_Key], tuple[str]]:
        """Stand for its uuid where a cache pickles the configuration."""
        return _Key, (self.uuid(),)


class _Key:
    """What an `MLAPass` becomes when a cache key is made of it."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
