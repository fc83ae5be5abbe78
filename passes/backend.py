"""`torch.compile(model, backend="mla_ops")`: the passes in front of Inductor or another backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from mla_ops.errors import InvalidInputError
from mla_ops.passes.inductor import tag_caches
from mla_ops.passes.pipeline import check_names, rewrite
from mla_ops.passes.report import RewriteReport

__all__ = ["make_backend", "mla_ops_backend"]

Compiled = Callable[..., Any]
_PREFIX = "mla_ops."


def make_backend(
    inner: str | Compiled = "inductor",
    *,
    disable: Iterable[str] = (),
    strict: bool = False,
    on_report: Callable[[RewriteReport], object] | None = None,
) -> Compiled:
    """Return a `torch.compile` backend that rewrites the graph and hands it on.

    Args:
        inner: who compiles the rewritten graph: a name that `torch.compile` knows (`"inductor"`,
            `"aot_eager"`, `"eager"`, ...) or a function of the graph module and its inputs.
        disable: names of passes that do not run.
        strict: raise when an attention that looks like latent attention was left alone.
        on_report: called with the report of every graph.

    Returns:
        A backend. With Inductor it takes `mode=` and `options=` of `torch.compile`. Since those
        exclude each other there, `options` may also hold `"mla_ops.mode"`, and
        `"mla_ops.disable"` and `"mla_ops.strict"`, which override the arguments here.

    Raises:
        InvalidInputError: `disable` names no pass; or, at compile time, an unknown option.
        RewriteError: at compile time, under `strict`.

    Example:
        >>> import torch
        >>> from mla_ops.passes import make_backend
        >>> reports = []
        >>> backend = make_backend("eager", on_report=reports.append)
        >>> compiled = torch.compile(torch.nn.ReLU(), backend=backend)
        >>> compiled(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
        >>> len(reports)
        1
    """
    chosen = {"disable": check_names(disable), "strict": strict}

    def backend(
        gm: GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Compiled:
        ours, theirs = _part(options or {})
        mode = ours.pop("mode", mode)
        tag_caches()
        report = rewrite(gm, **{**chosen, **ours})
        if on_report is not None:
            on_report(report)
        return _hand_on(inner, gm, example_inputs, mode, theirs, kwargs)

    backend.reset = _reset  # type: ignore[attr-defined]
    return backend


def _part(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part our options from those of the inner backend."""
    ours, theirs = {}, {}
    for name, value in options.items():
        if name.startswith(_PREFIX):
            ours[name.removeprefix(_PREFIX)] = value
        else:
            theirs[name] = value
    unknown = [name for name in ours if name not in ("mode", "disable", "strict")]
    if unknown:
        raise InvalidInputError(
            "options may hold mla_ops.mode, mla_ops.disable and mla_ops.strict; got "
            + ", ".join(_PREFIX + name for name in unknown)
        )
    return ours, theirs


def _hand_on(
    inner: str | Compiled,
    gm: GraphModule,
    inputs: list[Any],
    mode: str | None,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Compiled:
    """Compile the rewritten graph with the inner backend, with the user's mode and options."""
    if inner == "inductor":
        by_mode = torch._inductor.list_mode_options(mode) if mode is not None else {}
        compiled: Compiled = torch._inductor.compile(gm, inputs, options={**by_mode, **options})
        return compiled
    if mode is not None:
        kwargs["mode"] = mode
    if options:
        kwargs["options"] = options
    function = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
    return function(gm, inputs, **kwargs)


def _reset() -> None:
    """Drop recorded CUDA graphs, as `torch._dynamo.reset` asks every backend to."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


mla_ops_backend = make_backend()
"""The backend that `torch.compile` finds under the name `mla_ops`."""
