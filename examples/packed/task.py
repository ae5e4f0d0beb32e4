r"""Sequences of any length in windows of one: several in each, which do not see each other.

    hvdkit example packed
    horovodrun -np 2 python train.py --task=packed --run_dir=runs/packed \
        --optimizer=adam --base_lr=0.003 --num_steps=300 --eval_every=0

The engine traces one step, for batches of one shape. Packed windows keep that shape and pad little:
the texts are paragraphs of Python's manual, next byte by next byte; each comes once an epoch. A
sequence has the scores and the losses that it has alone (tests/examples/test_packed.py).
"""

import pydoc_data.topics

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays
from hvdkit.train.preprocessing import wide

TOKENS, WINDOW, WIDTH, HEADS = 256, 128, 64, 4


class Task:
    main_metric = "accuracy"

    def __init__(self, config):
        self.config = config

    def sources(self):
        texts = "\n\n".join(pydoc_data.topics.topics.values()).encode().split(b"\n\n")
        held_out = len(texts) // 20
        return packed(texts[:-held_out]), packed(texts[-held_out:])

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def evaluation_example(self, sample):
        tokens, of = tf.cast(sample["tokens"], tf.int32), sample["sequence"]
        # A target is the next byte of the same sequence.
        counts = (of[1:] > 0) & (of[1:] == of[:-1])
        inputs = {
            "tokens": tokens[:-1],
            "sequence": of[:-1],
            "place": sample["place"][:-1],
        }
        return {"inputs": inputs, "targets": {"next": tokens[1:], "counts": counts}}

    def build_model(self):
        """Tokens, sequences and places [WINDOW] -> scores of the next token, [WINDOW, TOKENS]."""
        names = ("tokens", "sequence", "place")
        inputs = {
            name: keras.Input((WINDOW,), dtype="int32", name=name) for name in names
        }
        x = keras.layers.Embedding(TOKENS, WIDTH, name="embed")(inputs["tokens"])
        x = x + keras.layers.Embedding(WINDOW, WIDTH, name="places")(inputs["place"])
        of = inputs["sequence"]
        # And not what comes later.
        mask = keras.ops.equal(of[:, :, None], of[:, None, :])
        y = keras.layers.LayerNormalization(name="norm1")(x)
        # A bias of keys has no effect, so its gradient is noise.
        attend = keras.layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, use_bias=False, name="heads"
        )
        x = x + attend(y, y, attention_mask=mask, use_causal_mask=True)
        x = keras.layers.Dense(4 * WIDTH, activation="gelu", name="mlp")(x)
        return keras.Model(
            inputs, keras.layers.Dense(TOKENS, name="scores", dtype=wide())(x)
        )

    def loss(self, outputs, targets):
        """Its mean is over all bytes that count, of all ranks: however full their windows are."""
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            targets["next"], outputs
        )
        return losses, tf.cast(targets["counts"], losses.dtype)

    def sums(self, outputs, targets):
        hits = tf.argmax(outputs, axis=-1, output_type=tf.int32) == targets["next"]
        hits &= targets["counts"]
        counts = tf.math.count_nonzero(targets["counts"])
        return {"hits": tf.math.count_nonzero(hits), "bytes": counts}

    def metrics(self, sums):
        return {"accuracy": float(sums["hits"] / sums["bytes"])}


def packed(texts):
    """Windows of WINDOW + 1 bytes: tokens, the sequence of each (1, 2, ...; 0: none) and its place.

    Best fit, the longest first: into the fullest window that has room. Longer texts are cut.
    """
    size = WINDOW + 1
    parts = [text[i : i + size] for text in texts for i in range(0, len(text), size)]
    # Numbers of windows, by their room.
    windows, with_room = [], [[] for _ in range(size + 1)]
    for part in sorted(parts, key=len, reverse=True):
        room = next((room for room in range(len(part), size) if with_room[room]), size)
        if room == size:
            windows.append([])
        number = with_room[room].pop() if room < size else len(windows) - 1
        windows[number].append(part)
        with_room[room - len(part)].append(number)
    arrays = {
        n: np.zeros((len(windows), size), np.int32)
        for n in ("tokens", "sequence", "place")
    }
    for number, window in enumerate(windows):
        ends = np.cumsum([len(part) for part in window])
        arrays["tokens"][number, : ends[-1]] = np.frombuffer(b"".join(window), np.uint8)
        for one, (part, end) in enumerate(zip(window, ends), start=1):
            arrays["sequence"][number, end - len(part) : end] = one
            arrays["place"][number, end - len(part) : end] = np.arange(len(part))
    return Arrays(**arrays)
