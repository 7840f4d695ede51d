"""Memory habits of a process that decodes, set by entry points before torch is imported.

glibc maps blocks of a few megabytes afresh and gives them back, and logits are such blocks, made and dropped every
round: touching fresh pages costs more than the arithmetic on them. And oneDNN keeps compiled kernels for a
thousand shapes, about a megabyte each, where a server that batches and speculates meets hundreds of widths.
"""

import ctypes
import sys
from collections.abc import MutableMapping

# mallopt's numbers and our values for them (malloc.h); 32 MiB is the largest threshold that it takes.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = (-1, 512 << 20), (-2, 64 << 20), (-3, 32 << 20)
KERNELS = "256"  # kept of each cache: some fifty widths of a decoder's handful of shapes
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's own, and that of torch's layer over it


def settle(environ: MutableMapping[str, str]) -> None:
    """Both habits, for this process; what the environment says of the caches stands."""
    for name in CACHES:
        environ.setdefault(name, KERNELS)
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Let freed blocks be used again rather than given back to the system; False where the C library is another."""
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return False
    return all(library.mallopt(*option) == 1 for option in (TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD))
