"""Takes the place of `sgl_kernel` in the CPU environment of the tests.

The published `sgl-kernel` wheel holds CUDA code only, and SGLang imports names from it even where nothing of it will
run. This module lets those imports succeed and nothing else: each kernel raises as soon as it is called, so a test can
never pass on a made-up result. SGLang serves a dense bfloat16 model on CPU with plain PyTorch and calls none of them.

Names that do not exist on CPU raise AttributeError, which SGLang's guarded imports (`try: from sgl_kernel import ...`)
already expect.
"""

from collections.abc import Callable
from typing import Any

_ALSO_IMPORTED_ON_CPU = frozenset({"verify_tree_greedy"})


def __getattr__(name: str) -> Callable[..., Any]:
    if not (name.endswith("_cpu") or name in _ALSO_IMPORTED_ON_CPU):
        raise AttributeError(f"module 'sgl_kernel' (the tests' stand-in) has no attribute {name!r}")

    def missing_kernel(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the CPU environment of the tests")

    missing_kernel.__name__ = name
    return missing_kernel
