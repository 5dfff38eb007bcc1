"""Numbers that the C++ kernels and Python must agree on. `native/types.hpp` defines them; this module imports them.

Importing it raises KernelError if the native module is missing or cannot be loaded.
"""

from tpi.errors import KernelError

try:
    from tpi.kernels._native import KV_GROUP, KV_RUN, KV_WORD, PAGE_TOKENS, STREAM_TOKENS, THREADS_MOST, slices
except ImportError as error:
    raise KernelError(
        f"the native kernels cannot be loaded ({error}); install a C++ compiler and run `pip install .` again"
    ) from error

__all__ = ["KV_GROUP", "KV_RUN", "KV_WORD", "PAGE_TOKENS", "STREAM_TOKENS", "THREADS_MOST", "slices"]
