"""Checkpoints of one small variable, by one rank, without a launcher; weights that count."""

import tensorflow as tf

from hvdkit.data.place import Place
from hvdkit.ranks.world import World
from hvdkit.scores import Score
from hvdkit.settings import Settings

ALONE = World(0, 1, 0, 1)


def variables(value=1.0, shape=(2, 3), dtype=tf.float32):
    kernel = tf.Variable(tf.fill(shape, tf.cast(value, dtype)))
    return {"step": tf.Variable(7, dtype=tf.int64), "w/kernel": kernel}


def save(kept, step, value=1.0, score=None, config=None):
    place = Place(step, 32 * step)
    path = kept.write(kept.copy(place, variables(value), config or Settings()))
    if score is not None:
        kept.add_score(of_step(step, score))
    return path


def of_step(step, value, loss=1.0, since=None):
    """A score of this value."""
    return Score(value, step, loss, since or step)


def restored(kept, resume="auto"):
    into = variables(-1.0)
    kept.restore(kept.find(resume), into, Settings())
    return float(into["w/kernel"][0, 0])


def names(kept):
    return sorted(p.name for p in kept.folder.iterdir())


def _weights(model):
    """All weights but the one for the kind of pictures."""
    return [weight for weight in model.weights if weight.name != "mode"]


def counted(model, start=0.0):
    """The model, whose weights now count up from `start`, one number for each weight."""
    for number, variable in enumerate(_weights(model)):
        variable.assign(
            tf.fill(variable.shape, tf.cast(start + number, variable.dtype))
        )
    return model


def first_weights(model):
    """The `start` of a `counted` model, as each of its weights has it."""
    starts = []
    for number, weight in enumerate(_weights(model)):
        starts.append(float(weight.numpy().flat[0]) - number)
    return starts
