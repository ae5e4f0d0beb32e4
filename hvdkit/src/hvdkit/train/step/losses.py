"""Softmax cross-entropy, and the losses that a model adds by itself: regularizers and `add_loss`.

The latter count in training beside the task's loss. A term is a mean over the samples it was
computed from, so a micro-batch's term has the weight of its share of the global batch: a term of
the weights then counts once, and a term of activities is the mean over the global batch, on any
number of ranks and micro-batches.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import keras
import tensorflow as tf


def _integers(labels: tf.Tensor) -> tf.Tensor:
    labels = tf.convert_to_tensor(labels)
    # A cast would turn 1.9 into 1.
    if not (labels.dtype.is_integer or labels.dtype.is_bool):
        raise ValueError(
            f"labels are {labels.dtype.name}: make the numbers of classes integers "
            "(of one-hot labels: tf.argmax(labels, -1))"
        )
    return tf.cast(labels, tf.int64)


def require_classes(labels: tf.Tensor, num_classes: int) -> tf.Tensor:
    """The labels (integers of any shape) unchanged; use it where examples are made.

    When it runs, InvalidArgumentError names a label that is no class. Raises ValueError: they are
    no integers.
    """
    wide = tf.reshape(_integers(labels), [-1])
    known = (wide >= 0) & (wide < num_classes)
    text = f"label {{}} is no class: classes are 0 to {num_classes - 1}"
    return required(labels, text, values=wide, sound=known)


def required(
    tensor: tf.Tensor, text: str, *, values: tf.Tensor, sound: tf.Tensor
) -> tf.Tensor:
    """The tensor unchanged.

    When it runs, InvalidArgumentError says `text`, with the first of `values` that is not `sound`
    in the place of the text's " {} ".
    """
    before, after = text.split(" {} ")
    # One more value, which counts as wrong, is the first where all are sound.
    all_values = tf.concat(
        [tf.reshape(values, [-1]), tf.zeros([1], values.dtype)], axis=0
    )
    is_wrong = tf.concat([tf.reshape(~sound, [-1]), [True]], axis=0)
    first = tf.gather(all_values, tf.argmax(tf.cast(is_wrong, tf.float32)))
    # Not tf.debugging.Assert, whose branch keeps a batch from being read at once.
    is_sound = tf.raw_ops.Assert(
        condition=tf.reduce_all(sound), data=[before, first, after]
    )
    with tf.control_dependencies([is_sound]):
        return tf.identity(tensor)


def cross_entropy(
    logits: tf.Tensor,
    labels: tf.Tensor,
    *,
    valid: tf.Tensor | None = None,
    smoothing: float = 0.0,
    class_weights: Sequence[float] = (),
) -> tuple[tf.Tensor, tf.Tensor]:
    """Losses and weights, both of the labels' shape, in float32 (float64 for logits of float64).

    A task's `loss` returns them: the run's loss is sum(losses * weights) / sum(weights). A label
    that is no class makes the loss NaN: the step is not applied, and a run of such steps ends.

    Args:
      logits: float [..., classes].
      labels: integers [...]; outside [0, classes) only where not valid.
      valid: bool [...], positions to count; all of them when None.
      smoothing: the target is (1 - smoothing) on the label and smoothing / classes on every
        class (Szegedy et al. 2016, arXiv:1512.00567, section 7).
      class_weights: weight of each class; a label beyond them is no class; empty: 1 for all.
    Raises:
      ValueError: for probabilities instead of logits, a single class, labels of floats, and a
        class weight that is negative or not finite.
    """
    _require_logits(logits)
    for weight in class_weights:
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"class_weights has {weight}: weights are finite numbers from 0 up"
            )
    logits = at_least_float32(tf.convert_to_tensor(logits))
    labels = _integers(labels)
    if valid is not None:
        labels = tf.where(valid, labels, 0)
    # TensorFlow would give NaN on a GPU, and end one rank in mid-step on a CPU.
    known = (labels >= 0) & (labels < logits.shape[-1])
    if class_weights:
        known &= labels < len(class_weights)
    labels = tf.where(known, labels, 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=logits
    )
    if smoothing:
        # The cross-entropy to the uniform target; log-softmax is logits - log(sum(exp(logits))).
        uniform = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    losses = tf.where(known, losses, tf.constant(math.nan, losses.dtype))
    weights = tf.ones_like(losses)
    if class_weights:
        weights = tf.gather(tf.constant(class_weights, losses.dtype), labels)
    if valid is not None:
        weights = tf.where(valid, weights, tf.zeros_like(weights))
    return losses, weights


def mixed_cross_entropy(
    logits: tf.Tensor, targets: Mapping[str, tf.Tensor], **options: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """`cross_entropy`, with its `options`, of samples mixed of two, as it returns it.

    That of both labels, by share: the same as of a target of two classes. So are their weights.

    `targets`: "label" and "other", integers [...], and "share" of the first, float [...].
    """
    first, weights = cross_entropy(logits, targets["label"], **options)
    second, others = cross_entropy(logits, targets["other"], **options)
    share = tf.cast(targets["share"], first.dtype)
    weights = share * weights
    others = (1.0 - share) * others
    total = weights * first + others * second
    return tf.math.divide_no_nan(total, weights + others), weights + others


def _require_logits(logits: tf.Tensor) -> None:
    if logits.shape[-1] == 1:
        raise ValueError(
            "cross_entropy of one output is 0, whatever it is: give the last layer a unit for each "
            "class, also of two (or take tf.nn.sigmoid_cross_entropy_with_logits)"
        )
    last = origin(logits).op.type if tf.is_symbolic_tensor(logits) else ""
    if last in ("Softmax", "Sigmoid"):
        raise ValueError(
            f"the model ends with a {last.lower()}, and cross_entropy takes logits, to which it "
            "applies a softmax: leave out the last layer's activation"
        )


def origin(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of a graph that this one has the values of, perhaps in another shape or type."""
    while tensor.op.type in ("Cast", "Identity", "Reshape"):
        tensor = tensor.op.inputs[0]
    return tensor


def above(
    tensor: tf.Tensor, last: Set[tf.Operation] = frozenset()
) -> set[tf.Operation]:
    """The operations of its graph that it comes from; not what those of `last` come from."""
    operations: set[tf.Operation] = set()
    left = [tensor.op]
    while left:
        operation = left.pop()
        if operation not in operations:
            operations.add(operation)
            if operation not in last:
                left += [each.op for each in operation.inputs]
    return operations


@contextlib.contextmanager
def wide_activity_losses(model: keras.Model) -> Iterator[None]:
    """Inside, the model's activity regularizers add up in float32 at least.

    A sum over activities soon leaves float16. Keras divides it by the batch size.
    """
    regularized = []
    for layer in model._flatten_layers():
        regularizer = getattr(layer, "activity_regularizer", None)
        if regularizer:
            regularized.append((layer, regularizer))

    def wide(regularizer):
        return lambda x: regularizer(at_least_float32(x))

    try:
        for layer, regularizer in regularized:
            layer.activity_regularizer = wide(regularizer)
        yield
    finally:
        for layer, regularizer in regularized:
            layer.activity_regularizer = regularizer


@contextlib.contextmanager
def called_once(model: keras.Model) -> Iterator[None]:
    """Raises ValueError at its end where a network that adds losses was called twice inside.

    Keras clears them at each call of a network from outside.
    """
    networks = [n for n in model._flatten_layers() if isinstance(n, keras.Model)]
    called_again = []
    # Networks whose newest call was in inference: what that adds is not meant to count.
    inferring: set[int] = set()

    def watched_clear(network: keras.Model) -> Callable[[], None]:
        clear = network._clear_losses

        def clear_losses() -> None:
            adds = any(layer._losses for layer in network._flatten_layers())
            if adds and id(network) not in inferring:
                called_again.append(network.name)
            clear()

        return clear_losses

    def watched_call(network: keras.Model) -> Callable[..., Any]:
        call = network.call

        def called(*inputs: Any, **options: Any) -> Any:
            if options.get("training") is False:
                inferring.add(id(network))
            else:
                inferring.discard(id(network))
            return call(*inputs, **options)

        return called

    # A task may have given the instance a `call` of its own.
    own_calls = [vars(network).get("call") for network in networks]
    for network in networks:
        object.__setattr__(network, "_clear_losses", watched_clear(network))
        object.__setattr__(network, "call", watched_call(network))
    try:
        yield
    finally:
        for network, own_call in zip(networks, own_calls):
            object.__delattr__(network, "_clear_losses")
            object.__delattr__(network, "call")
            if own_call is not None:
                object.__setattr__(network, "call", own_call)
    if called_again:
        raise ValueError(
            f"the losses call {called_again[0]} when it, or a network that shares its layers, has "
            "added losses before, and Keras forgets these: call it once on both (tf.concat), or "
            "make such terms losses"
        )


def adds_of_samples(model: keras.Model) -> bool:
    """Whether its newest call added losses besides those of its weights."""
    return any(layer._losses for layer in model._flatten_layers())


def added_loss(model: keras.Model) -> tf.Tensor | None:
    """The sum of the losses of the model's newest call, a scalar; None where it adds none."""
    terms = [
        tf.reduce_mean(at_least_float32(tf.convert_to_tensor(term)))
        for term in model.losses
    ]
    if not terms:
        return None
    dtype = widest(terms)
    return tf.add_n([tf.cast(term, dtype) for term in terms])


def widest(tensors: Iterable[tf.Tensor]) -> tf.DType:
    """The largest type of these tensors."""
    return max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.size)


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """float16 and bfloat16 become float32: sums over a batch need its range and its digits."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
