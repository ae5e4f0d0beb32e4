"""Random draws in training: by rank, by virtual rank (`Seeds`) or by sample (`SampleDropout`)."""

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from tensorflow.python.ops import gen_stateless_random_ops_v2 as draws

from hvdkit.logs import join
from hvdkit.ranks.world import raw
from hvdkit.train.layers import saved_layers

_DRAWS = (
    "stateless_random_uniform_v2",
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_full_int_v2",
    "stateless_random_normal_v2",
    "stateless_truncated_normal_v2",
)


class RankSeedGenerator(keras.random.SeedGenerator):
    """Keras's generator with draws that differ between ranks; rank 0 draws what it would alone.

    With Keras's own, samples at the same place of every rank's share would get the same draws. The
    state stays the same on every rank, so that it is saved and restored like other variables.
    """

    def next(self, ordered: bool = True) -> tf.Tensor:
        seed = super().next(ordered)
        return seed + tf.constant([hvd.rank(), 0], seed.dtype)


def generators(layers: Sequence[keras.Layer]) -> list[keras.random.SeedGenerator]:
    """The seed generators of layers, each once."""
    by_id = {}
    for layer in layers:
        for generator in layer._seed_generators:
            by_id[id(generator)] = generator
    return list(by_id.values())


def draw_by_rank(made: Sequence[keras.random.SeedGenerator]) -> None:
    """Makes every seed generator of Keras's own class a `RankSeedGenerator`, in place."""
    for generator in made:
        if type(generator) is keras.random.SeedGenerator:
            generator.__class__ = RankSeedGenerator


def draws_by_rank(generator: keras.random.SeedGenerator) -> bool:
    """Whether `draw_by_rank` makes it one that does: subclasses of Keras's stay as they are."""
    return type(generator) in (keras.random.SeedGenerator, RankSeedGenerator)


@contextlib.contextmanager
def same_in_each_row(made: Sequence[keras.random.SeedGenerator]) -> Iterator[None]:
    """Inside, each row of a batch draws what the first one does, alike on all ranks."""
    by_rank = [each for each in made if type(each) is RankSeedGenerator]
    before = {name: getattr(draws, name) for name in _DRAWS}
    try:
        for generator in by_rank:
            generator.__class__ = keras.random.SeedGenerator
        for name, draw in before.items():
            setattr(draws, name, _repeating(draw))
        yield
    finally:
        for generator in by_rank:
            generator.__class__ = RankSeedGenerator
        for name, draw in before.items():
            setattr(draws, name, draw)


def _repeating(draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """`draw` of a shape, whose rows are all the first one.

    In three dimensions and more its columns too: samples may lie along the second dimension, as in
    [time, batch, features].
    """

    def drawn(shape: Any, *arguments: Any, **options: Any) -> tf.Tensor:
        shape = tf.convert_to_tensor(shape)
        rank = shape.shape[0]
        if not rank:
            return draw(shape, *arguments, **options)
        repeated = 2 if rank > 2 else 1
        ones = tf.ones([repeated], shape.dtype)
        once = draw(tf.concat([ones, shape[repeated:]], 0), *arguments, **options)
        return tf.broadcast_to(once, shape)

    return drawn


def drawing_layers(model: keras.Model) -> list[str]:
    """Names of the layers that draw by rank: with them weights depend on the number of ranks."""

    names = []
    for layer in model._flatten_layers():
        if not layer._seed_generators:
            continue
        # Recurrent cells have a generator whether they drop anything or not.
        rates = [
            getattr(layer, name, None) for name in ("dropout", "recurrent_dropout")
        ]
        if None in rates or any(rates):
            names.append(layer.path or layer.name)
    return names


class Seeds:
    """The states of seed generators, drawn anew for every virtual rank and step."""

    def __init__(
        self,
        seed: int,
        made: Sequence[keras.random.SeedGenerator],
        evaluating: bool = False,
    ) -> None:
        self.variables = [raw(each.state) for each in made if draws_by_rank(each)]
        # Keys of samples are drawn under the key `seed`; the highest bits make this another key.
        self._key = seed | 1 << 63 | int(evaluating) << 62

    def assign(self, step: tf.Tensor, number: tf.Tensor) -> None:
        """Args: step and number of the virtual rank (of the batch, evaluating), int64 scalars."""
        if not self.variables:
            return
        # Philox counts one up for every four words: 2**32 lie between two virtual ranks.
        words = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[len(self.variables), 2],
            key=tf.constant([self._key], tf.uint64),
            counter=tf.cast(tf.stack([number * 2**32, step]), tf.uint64),
            alg=tf.random.Algorithm.PHILOX.value,
            dtype=tf.uint32,
        )
        for variable, state in zip(self.variables, tf.unstack(words)):
            # Keras draws from (a, b + k) in its k-th draw, both modulo 2**31 - 2.
            variable.assign(tf.cast(state % (2**31 - 2), variable.dtype))


def notes_on_equal_draws(layers: Iterable[keras.Layer]) -> list[str]:
    """A note where SampleDropouts have one name, so that they drop the same features."""
    names = Counter(layer.name for layer in layers if isinstance(layer, SampleDropout))
    again = [name for name, count in names.items() if count > 1]
    if not again:
        return []
    return [
        f"several layers SampleDropout are named {join(again)}, and drop the same features of a "
        "sample: give each a name of its own, or none"
    ]


@saved_layers.register
class SampleDropout(keras.layers.Layer):
    """Dropout (Srivastava et al. 2014) with a key for every sample.

    Called as layer([features, keys]) with keys int32 [batch, 2], those that a task's
    `training_example` is given. The same sample at the same step then loses the same features on
    any number of ranks. Keras's own Dropout draws by rank. Layers draw by their names, and a layer
    that is called twice drops the same features twice: make one for each place.
    """

    def __init__(self, rate: float, **kwargs) -> None:
        super().__init__(**kwargs)
        self.rate = rate
        self.supports_masking = True
        # The salt makes layers draw different numbers.
        self.salt = zlib.crc32(self.name.encode()) & 0x7FFFFFFF

    def call(self, inputs: list[tf.Tensor], training: bool = False) -> tf.Tensor:
        features, keys = inputs
        if not training or not self.rate:
            return features

        def keep(key: tf.Tensor) -> tf.Tensor:
            key = tf.random.experimental.stateless_fold_in(key, self.salt, alg="philox")
            # Computed as stateless_uniform does: XLA would make other floats of the same bits.
            shape = tf.shape(features)[1:]
            bits = tf.random.stateless_uniform(
                shape, key, None, None, tf.int32, alg="philox"
            )
            return tf.cast(bits & 0x7FFFFF, tf.float32) * 2.0**-23 >= self.rate

        mask = tf.map_fn(
            keep, keys, fn_output_signature=tf.TensorSpec(features.shape[1:], tf.bool)
        )
        scaled = features / tf.cast(1.0 - self.rate, features.dtype)
        return tf.where(mask, scaled, tf.zeros_like(features))

    def get_config(self) -> dict:
        return super().get_config() | {"rate": self.rate}
