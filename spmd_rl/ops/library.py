"""Loads the compiled kernels. Where they are not built, the torch reference beside each kernel serves, and says so."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch

NAMESPACE = "spmd_rl"
log = logging.getLogger(__name__)


@functools.cache
def built() -> bool:
    """Whether `torch.ops.spmd_rl.*` are there; loads them at the first call.

    Results are the same without them, only slower: one warning per process says how to build them. Raises
    RuntimeError where a library is there but does not load (made for another torch).
    """
    folder = Path(__file__).parent
    libraries = sorted(folder.glob("_kernels*.so"))
    if not libraries:
        log.warning(
            "kernels are not built: the (slower) torch reference serves; build them with "
            "`pip install --no-build-isolation -e .`"
        )
        return False
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        raise RuntimeError(
            f"{libraries[0].name} does not load into torch {torch.__version__}; build it again with "
            f"`pip install --no-build-isolation -e .` ({error})"
        ) from None
    return True
