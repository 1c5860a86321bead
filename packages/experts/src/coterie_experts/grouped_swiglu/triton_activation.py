"""What the Triton kernels need of the activations, in float32; ``activation.py`` has the formulas."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

__all__ = ["fast_sigmoid", "held_below", "held_within"]


@triton.jit
def fast_sigmoid(x):
    """Return 1 / (1 + e^-x) in five instructions, within a few units in the last place; a division alone takes more."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def held_below(x, LIMIT: tl.constexpr):
    """Return min(x, limit), and NaN for NaN."""
    return tl.where(x > LIMIT, LIMIT, x)


@triton.jit
def held_within(x, LIMIT: tl.constexpr):
    """Return x held to [-limit, limit], and NaN for NaN."""
    return tl.where(x < -LIMIT, -LIMIT, tl.where(x > LIMIT, LIMIT, x))
