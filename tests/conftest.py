"""The environment of every test.

* Fresh memory is poison: NaN, the largest integer, True. A kernel that reads what it has not
  written gives a wrong result instead of a lucky one. The poison comes from torch's allocator, so
  it is there inside ops and in compiled code, and changes no traced graph. A test that needs
  untouched memory (a huge allocation, say) sets
  `torch.utils.deterministic.fill_uninitialized_memory = False`; the next test has it back.
* Seeds are fixed, and Dynamo forgets what it has compiled between tests.
* Compile caches live in a folder of this session: a stale artifact cannot make a test pass.
* Nothing is fetched from a model hub.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Without it, cuBLAS warns on every matrix product while deterministic algorithms are on.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

settings.register_profile("mla_ops", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("mla_ops")


def pytest_configure(config: pytest.Config) -> None:
    """Make the session's compile cache and share the cores out among the workers."""
    if not hasattr(config, "workerinput"):  # the controller, or a run without workers
        cache = tempfile.mkdtemp(prefix="mla_ops-tests-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a `gpu` test where there is no CUDA device."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("marked gpu, and torch sees no CUDA device")


@pytest.fixture(scope="module")
def with_one_thread() -> Iterator[None]:
    """One thread: small tests are slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["cpu", "tiled"])
def either_cpu_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `auto` takes on a CPU: the native kernels, or the tiled backend where there are none."""
    from native import has_native

    from mla_ops import dispatch

    if request.param == "cpu" and not has_native():
        pytest.skip("no C++ compiler")
    registry = dict(dispatch._registry)
    if request.param != "cpu":
        del registry["cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_registry", registry)
        dispatch._select.cache_clear()
        yield request.param
    dispatch._select.cache_clear()


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
