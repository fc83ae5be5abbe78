"""The word problems for lm-evaluation-harness; `word_problems.yaml` beside this file calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mla_ops.accuracy.problems import PROBLEMS_FILE, SHOTS_FILE

__all__ = ["TASKS_FOLDER", "load_dataset"]

TASKS_FOLDER = str(Path(__file__).parent)
"""What `lm_eval.tasks.TaskManager(include_path=...)` and `lm_eval --include_path` are given."""


def load_dataset(**_: Any) -> Any:
    """Return the shipped problems as a dataset with the splits `train` and `test`."""
    from datasets import load_dataset as load

    files = {"train": str(SHOTS_FILE), "test": str(PROBLEMS_FILE)}
    return load("json", data_files=files)
