"""Memory that one step frees, the next one needs."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory for the next step rather than hand it back to the system.

    By default buffers of some megabytes (the logits, above all) are mapped afresh in each step, and the system fills
    every page of them with zeros before they are written: on the CPU a tenth of a ``tiny`` step. The process then holds
    its peak until it ends, as it would reach it again in the next step anyway.

    Returns whether it was done; without glibc nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # Older versions refuse more than 32 MiB for the second.
    thresholds = ((M_TRIM_THRESHOLD, (LARGEST,)), (M_MMAP_THRESHOLD, (LARGEST, 32 * 2**20)))
    return all(any(mallopt(option, size) for size in sizes) for option, sizes in thresholds)
