"""`mla-ops accuracy`: one model, one set of tasks, every way to cut the prompts.

Perplexity of a text, arithmetic word problems and needle retrieval, answered by stock transformers
and by `mla_ops` without chunks, with chunks, and at several token budgets. All have to score the
same, and in fp32 to generate the same tokens. Needs `pip install 'mla-ops[demo]'`.

`TASKS_FOLDER` holds the word problems as a task of lm-evaluation-harness.
"""

from __future__ import annotations

from mla_ops.accuracy.errors import AccuracyError
from mla_ops.accuracy.evaluate import AccuracyOptions, Observer, run_accuracy
from mla_ops.accuracy.harness import TASKS_FOLDER
from mla_ops.accuracy.report import AccuracyReport

__all__ = [
    "TASKS_FOLDER",
    "AccuracyError",
    "AccuracyOptions",
    "AccuracyReport",
    "Observer",
    "run_accuracy",
]
