"""The Triton backend: every op as GPU kernels, imported when a call on a GPU chooses it.

`backend.py` takes the calls; each other module holds kernels of one kind with the function that
launches them, and `configs.py` the tile sizes. With `TRITON_INTERPRET=1` in the environment before
triton is imported, the kernels run on CPU tensors.
"""
