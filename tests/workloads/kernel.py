"""System calls that Python 3.11 has no function for. Raise OSError."""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """A function of libc that answers -1 for an error."""
    result = getattr(libc, name)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result
