r"""A small GPT: the next token, from windows of one file, which may be larger than the memory.

    hvdkit example tokens
    horovodrun -np 2 python train.py --task=tokens --run_dir=runs/tokens --data_dir=text \
        --optimizer=adamw --base_lr=0.003 --num_steps=500 --eval_every=0

The text is Python's own manual (pydoc_data.topics), a byte a token, in DATA_DIR/tokens.npy; a file
of uint16 or uint32 will do too (TOKENS: how many different ones). The network is GPT-2's (Radford
et al. 2019: layer norm before attention and MLP, GELU, learned positions), made small; its last
layer has weights of its own.
Blocks are computed again for the gradient (RECOMPUTE), so that of each only the input is kept: with
WINDOW, WIDTH, LAYERS = 256, 128, 8 and 16 windows a step, a process on a CPU takes 1.25 GB at its
peak instead of 1.63, TensorFlow's own included, and the losses are the same.
"""

import os
import pydoc_data.topics
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays
from hvdkit.train.preprocessing import wide

TOKENS, WINDOW, WIDTH, HEADS, LAYERS = 256, 64, 64, 4, 2
# Without it the weights are the same, and steps take less time and more memory.
RECOMPUTE = True
HELD_OUT = 0.05  # of the text, its end


class Block(keras.layers.Layer):
    """Attention to what came before, then an MLP: vectors [WINDOW, WIDTH] -> the same shape."""

    def build(self, shape):
        layers = keras.layers
        self.norm1 = layers.LayerNormalization(name="norm1")
        # A bias of keys has no effect, so its gradient is noise.
        self.attention = layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, use_bias=False, name="attention"
        )
        self.norm2 = layers.LayerNormalization(name="norm2")
        self.mlp1 = layers.Dense(4 * WIDTH, activation="gelu", name="mlp1")
        self.mlp2 = layers.Dense(WIDTH, name="mlp2")
        for layer in (self.norm1, self.norm2, self.mlp1):
            layer.build(shape)
        self.attention.build(shape, shape)
        self.mlp2.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        return tf.recompute_grad(self.computed)(x) if RECOMPUTE else self.computed(x)

    def computed(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.mlp2(self.mlp1(self.norm2(x)))


class Task:
    main_metric = "accuracy"

    def __init__(self, config):
        self.config = config
        self._file = Path(config.data_dir) / "tokens.npy"

    def prepare(self):
        if self._file.exists():
            return
        text = "".join(pydoc_data.topics.topics.values()).encode()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_name(f".{os.getpid()}.npy")  # whole or not there
        np.save(partial, np.frombuffer(text, np.uint8))
        partial.rename(self._file)

    def sources(self):
        tokens = np.load(self._file, mmap_mode="r")
        train, val = np.split(tokens, [int(len(tokens) * (1 - HELD_OUT))])
        # A window and the token after it; in training one begins every 8 tokens.
        windows = np.lib.stride_tricks.sliding_window_view
        return tuple(
            Arrays(tokens=windows(part, WINDOW + 1)[::every])
            for part, every in ((train, 8), (val, WINDOW))
        )

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def evaluation_example(self, sample):
        tokens = tf.cast(sample["tokens"], tf.int32)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}

    def build_model(self):
        """Tokens [WINDOW] -> scores of the next one at each place, [WINDOW, TOKENS]."""
        tokens = keras.Input((WINDOW,), dtype="int32")
        embed = keras.layers.Embedding(TOKENS, WIDTH, name="embed")
        places = keras.layers.Embedding(WINDOW, WIDTH, name="places")
        x = embed(tokens) + places(keras.ops.arange(WINDOW))[None]
        for number in range(LAYERS):
            x = Block(name=f"block{number}")(x)
        x = keras.layers.LayerNormalization(name="norm")(x)
        return keras.Model(
            tokens, keras.layers.Dense(TOKENS, name="scores", dtype=wide())(x)
        )

    def loss(self, outputs, targets):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
        return losses, tf.ones_like(losses)

    def sums(self, outputs, targets):
        losses, _ = self.loss(outputs, targets)
        hits = tf.argmax(outputs, axis=-1, output_type=tf.int32) == targets
        nats = tf.reduce_sum(tf.cast(losses, tf.float64))
        return {
            "hits": tf.math.count_nonzero(hits),
            "nats": nats,
            "tokens": tf.size(targets),
        }

    def metrics(self, sums):
        """Accuracy of the next byte, and bits a byte."""
        bits = float(sums["nats"] / sums["tokens"] / np.log(2))
        return {"accuracy": float(sums["hits"] / sums["tokens"]), "bits_a_byte": bits}
