"""What the verbs have in common: where results go, and how a table looks."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.table import Table

from mla_ops.errors import InvalidInputError

__all__ = ["check_outputs", "table", "write_json"]


def check_outputs(*paths: Path | None) -> None:
    """Find out before the work, not after it, that its results cannot be written.

    Args:
        paths: files to be written, None for those that were not asked for.

    Raises:
        InvalidInputError: one is a folder, or its folder does not exist.
    """
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InvalidInputError(f"expected a file in an existing folder, got {path}")


def write_json(path: Path | None, document: object) -> None:
    """Write a document, if a file was asked for.

    Args:
        path: the file, or None.
        document: anything that JSON can hold; NaN and infinity are refused.
    """
    if path is not None:
        text = json.dumps(document, indent=2, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")


def table(title: str, *columns: str, header: bool = True) -> Table:
    """Return an empty table in the style of the verbs.

    Args:
        title: shown above it.
        columns: names of the columns.
        header: whether the names are shown.
    """
    made = Table(
        title=title,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD if header else None,
        show_header=header,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        made.add_column(column)
    return made
