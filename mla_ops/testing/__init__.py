"""Tools for testing a backend, and code that is to be captured in a CUDA graph.

A new backend is checked in one call, which raises an `AssertionError` that lists what is wrong:

```python
mla_ops.register_backend(MyBackend())
mla_ops.testing.check_backend("mine")
```

or case by case: parametrize over `conformance_cases()` and call `case.check("mine", dtype)`. A
result is right when it is as close to the fp64 oracle as an ordinary implementation in the same
dtype is; the ordinary one is `mla_ops.reference`.

`forbid_host_sync` and `EmulatedGraph` find, without a GPU, what a CUDA graph would not survive.
"""

from __future__ import annotations

from mla_ops.testing.capture import EmulatedGraph, HostSyncError, forbid_host_sync
from mla_ops.testing.conformance import (
    DIMS,
    AttentionInputs,
    ConformanceCase,
    assert_within_budget,
    attention_inputs,
    check_backend,
    conformance_cases,
)

__all__ = [
    "DIMS",
    "AttentionInputs",
    "ConformanceCase",
    "EmulatedGraph",
    "HostSyncError",
    "assert_within_budget",
    "attention_inputs",
    "check_backend",
    "conformance_cases",
    "forbid_host_sync",
]
