"""Sums that do not depend on their order: floats as int64 multiples of a power of two.

Integer addition is exact, so neither the number of ranks nor fusion, ring, tree or backend changes
a bit of a sum. docs/same-weights.md of the engine's repository has the grids' analysis.

XLA compiles what is done to each gradient into one loop over memory, instead of a dozen.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from hvdkit.stop import DIVERGED

# The finest bit of a gradient, and of state: a coarse part and what it leaves over.
GRADIENT_BITS = 48
STATE_BITS = (20, 70)
# What V addends may be at most, times V: so far from 2**63 no sum of roundings wraps.
LARGEST_GRADIENT = 2.0 ** (62 - GRADIENT_BITS)
LARGEST_STATE = 2.0 ** (62 - STATE_BITS[0])
# Below it fewer than 4 bits of a gradient are left.
SMALLEST_GRADIENT = 2.0 ** (4 - GRADIENT_BITS)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """All elements in a row: float32, or float64 where any tensor is. Widening is exact."""
    wide = tf.float64 if any(t.dtype == tf.float64 for t in tensors) else tf.float32
    flat = [tf.reshape(tf.cast(t, wide), [-1]) for t in tensors]
    return tf.concat(flat or [tf.zeros([0], wide)], 0)


def judge(
    flat: tf.Tensor,
    addends: int,
    *,
    scale: tf.Tensor | float = 1.0,
    most: float = LARGEST_GRADIENT,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Whether all elements are finite, all / `scale` fit, and the largest keeps 4 bits.

    Bool scalars. `most`: the largest sum of `addends`.
    """
    if flat.shape[0] == 0:
        return tf.constant(True), tf.constant(True), tf.constant(True)
    scale = tf.cast(scale, tf.float64)
    low = tf.reduce_min(flat)  # NaN if any element is NaN
    high = tf.reduce_max(flat)
    finite = tf.math.is_finite(low) & tf.math.is_finite(high)
    largest = tf.cast(tf.maximum(-low, high), tf.float64)
    precise = (largest == 0) | (largest >= SMALLEST_GRADIENT * scale) | ~finite
    return finite, finite & (largest <= most / addends * scale), precise


def to_fixed(
    values: tf.Tensor, bits: int, addends: int, *, scale: tf.Tensor | float = 1.0
) -> tf.Tensor:
    """`values / scale` in units of 2**-bits, int64; a sum of `addends` of them cannot overflow.

    What does not fit becomes 0: NaN, infinity, and what is larger than 2**(62 - bits) / addends.
    `scale` is a power of two, so that dividing by it is exact.
    """
    scaled = tf.cast(values, tf.float64) * (2.0**bits / tf.cast(scale, tf.float64))
    fits = tf.abs(scaled) <= 2.0**62 / addends  # False for NaN
    # A cast of what does not fit would give any number.
    return tf.cast(tf.round(tf.where(fits, scaled, tf.zeros_like(scaled))), tf.int64)


def from_fixed(total: tf.Tensor, bits: int) -> tf.Tensor:
    """A sum of `to_fixed` as float64: exact below 2**53 units, else rounded once."""
    return tf.cast(total, tf.float64) * 2.0**-bits


@tf.function(autograph=False, jit_compile=True)
def add_gradients(
    total: tf.Tensor | None, flat: tf.Tensor, *, addends: int, scale: tf.Tensor
) -> tf.Tensor:
    """`total + to_fixed(flat)`, on the grid of gradients; None: nothing was added yet."""
    addend = to_fixed(flat, GRADIENT_BITS, addends, scale=scale)
    return addend if total is None else total + addend


def unpack_gradients(
    total: tf.Tensor,
    factor: tf.Tensor,
    *,
    shapes: Sequence[tf.TensorShape],
    dtype: tf.DType,
) -> list[tf.Tensor]:
    """Sums of packed gradients times `factor`, float64 scalar, rounded once to `dtype`."""
    sizes = [shape.num_elements() for shape in shapes]
    parts = tf.split(_from_gradients(total, factor, dtype=dtype), sizes)
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]


@tf.function(autograph=False, jit_compile=True)
def _from_gradients(total, factor, dtype):
    return tf.cast(from_fixed(total, GRADIENT_BITS) * factor, dtype)


def state_to_fixed(values: tf.Tensor, addends: int) -> tf.Tensor:
    """As `to_fixed`, for values of any layer: int64 [2, n] of floats [n], coarse and fine part.

    float32 numbers from 2**-46 to 2**42 / addends are exact in it.
    """
    coarse, fine = STATE_BITS
    values = tf.cast(values, tf.float64)
    high = to_fixed(values, coarse, addends)
    return tf.stack([high, to_fixed(values - from_fixed(high, coarse), fine, addends)])


def state_from_fixed(total: tf.Tensor) -> tf.Tensor:
    high, low = tf.unstack(total)
    return from_fixed(high, STATE_BITS[0]) + from_fixed(low, STATE_BITS[1])


def overflow(result: Mapping[str, tf.Tensor]) -> tuple[int, str, str] | None:
    """A fault that no smaller loss scale mends: exit code, a word or two, a sentence; or None."""
    if "faults" not in result:
        return None
    gradients = int(result["faults"][1])
    state = int(result["faults"][2])
    if not gradients and not state:
        return None
    return (
        DIVERGED,
        "overflow",
        f"at step {int(result['step'])} {gradients} virtual rank(s) have a gradient of their share "
        f"larger than {int(LARGEST_GRADIENT)}, and {state} a moving statistic larger than "
        f"{LARGEST_STATE:.0e}: it does not fit the fixed point of --virtual_ranks. Try a lower "
        "--base_lr, --warmup_steps, smaller inputs, or leave out --virtual_ranks",
    )


def note_on_underflow(result: Mapping[str, tf.Tensor]) -> str | None:
    """A note about a step whose gradients lose their digits, or None."""
    if "faults" not in result or not result["faults"][3]:
        return None
    return (
        f"note: at step {int(result['step'])} all gradients of a virtual rank are smaller than "
        f"{SMALLEST_GRADIENT:.0e}: the fixed point of --virtual_ranks keeps few of "
        "their digits or none. Multiply the loss by a factor, or leave out --virtual_ranks"
    )
