"""How the C library gives memory back, for training on a CPU."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Lets the process keep the memory that tensors free, so that the next tensors need not fault it in again.

    A training step on a CPU allocates and frees the same hundreds of megabytes again and again. glibc maps each large block
    anew, and the kernel clears it page by page, which took a tenth of a step of SmolLM2-135M. The peak is the same; what is
    freed in between stays with the process, so a GPU host, where only loading is large, is better off without. Nothing
    happens where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, _LARGEST)
    mallopt(_TOP_PAD, 2**28)
