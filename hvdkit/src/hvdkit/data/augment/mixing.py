"""MixUp and CutMix: two training pictures become one, with two labels and a share.

MixUp: Zhang et al. 2018 (arXiv:1710.09412). CutMix: Yun et al. 2019 (arXiv:1905.04899). There the
second picture is another one of the batch; here it is any other of the training set, by the
sample's key (hvdkit.data.sampler.partner), so that it does not depend on how ranks divide a batch.
"""

import tensorflow as tf

from hvdkit.data.augment import image_ops
from hvdkit.data.sampler import philox

Pair = tuple[tf.Tensor, tf.Tensor]


def mixed(pair: Pair, key: tf.Tensor, *, mixup: float, cutmix: float) -> Pair:
    """Two pictures, uint8 [H, W, 3], as one, and the first one's share of it (float32 scalar).

    `mixup`, `cutmix`: parameter of each one's Beta distribution, 0: off; one at least is on. Of
    both, each is taken half of the time.
    """
    share_key, place_key = tf.unstack(image_ops.keys(key, 2))
    draws = image_ops.uniform(place_key, 3)

    def by_mixup() -> Pair:
        share = beta(share_key, mixup)
        return blended(pair, share), share

    def by_cutmix() -> Pair:
        return cut(pair, beta(share_key, cutmix), draws[:2])

    if mixup and cutmix:
        return tf.cond(draws[2] < 0.5, by_mixup, by_cutmix)
    return by_mixup() if mixup else by_cutmix()


def beta(key: tf.Tensor, a: float) -> tf.Tensor:
    """A number from 0 to 1 of the distribution Beta(a, a), a > 0: float32 scalar.

    X / (X + Y) of X and Y from Gamma(a), each as Gamma(a + 1) * uniform ** (1 / a) (Marsaglia and
    Tsang 2000, section 6), in logarithms: a small `a` would make both 0.
    """
    gamma_key, uniform_key = tf.unstack(image_ops.keys(key, 2))
    gammas = philox(
        tf.raw_ops.StatelessRandomGammaV3,
        gamma_key,
        [0, 0],
        shape=[2],
        alpha=tf.constant(a + 1.0),
    )
    log_gammas = tf.math.log(gammas)
    log_uniforms = tf.math.log(1.0 - image_ops.uniform(uniform_key, 2))
    log_ratio = log_gammas[0] - log_gammas[1] + (log_uniforms[0] - log_uniforms[1]) / a
    return tf.sigmoid(log_ratio)


def blended(pair: Pair, share: tf.Tensor) -> tf.Tensor:
    """MixUp: `share` of the first picture and the rest of the second, rounded to whole shades."""
    first, second = (tf.cast(image, tf.float32) for image in pair)
    return tf.cast(second + share * (first - second) + 0.5, tf.uint8)


def cut(pair: Pair, share: tf.Tensor, draws: tf.Tensor) -> Pair:
    """CutMix: a box of the second picture in the first; and the first one's share of the pixels.

    The box has the picture's aspect and 1 - `share` of its area; its centre is anywhere (`draws`:
    [2] in [0, 1)), and what lies outside is cut off, which leaves the first one a greater share.
    """
    shape = tf.shape(pair[0])[:2]
    sizes = tf.cast(shape, tf.float32)
    sides = tf.cast(tf.sqrt(1.0 - share) * sizes + 0.5, tf.int32)
    start = tf.cast(draws * sizes, tf.int32) - sides // 2
    first = tf.maximum(start, 0)
    end = tf.minimum(start + sides, shape)

    rows = tf.range(shape[0])[:, None, None]
    columns = tf.range(shape[1])[None, :, None]
    in_rows = (rows >= first[0]) & (rows < end[0])
    in_columns = (columns >= first[1]) & (columns < end[1])
    image = tf.where(in_rows & in_columns, pair[1], pair[0])

    area = tf.cast(tf.reduce_prod(tf.maximum(end - first, 0)), tf.float32)
    return image, 1.0 - area / tf.reduce_prod(sizes)
