r"""Text classification with LoRA: a small BERT whose attention alone learns, by factors of rank 4.

    hvdkit example text
    horovodrun -np 2 python train.py --task=text --run_dir=runs/text --num_classes=2 \
        --optimizer=adam --base_lr=0.01 --num_steps=400 --eval_every=0
    echo '{"text": "The value is a list."}' > some.jsonl
    hvdkit predict --run_dir=runs/text --out=predicted some.jsonl
    hvdkit export --run_dir=runs/text --out=exported --check=some.jsonl
    python -c 'import hvdkit; hvdkit.load("runs/text").summary()'

Seen: accuracy 75 % on topics that are held out, where 53 % are prose.

Is a paragraph of Python's own manual (pydoc_data.topics) prose, or indented: code, grammar? The
encoder's own weights are random and stay so; begin with those of another run by --init_from=RUN. An
encoder of keras_hub, in the place of `small_bert` and `add_lora`:

    encoder = keras_hub.models.BertBackbone(VOCABULARY, LAYERS, HEADS, WIDTH, 4 * WIDTH)
    encoder.enable_lora(RANK)
    inputs = {"token_ids": words, "segment_ids": 0 * words, "padding_mask": words > 0}
    vectors = encoder(inputs)["sequence_output"]

or, behind the tokenizer of that name, BertBackbone.from_preset("bert_tiny_en_uncased").
"""

import pydoc_data.topics
import textwrap

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays
from hvdkit.train import losses
from hvdkit.train.preprocessing import wide

VOCABULARY, WORDS, WIDTH, HEADS, LAYERS = 2000, 48, 64, 4, 2
RANK = 4  # of LoRA's factors (Hu et al. 2021, arXiv:2106.09685)
HELD_OUT = 5  # every fifth topic of the manual


class Task:
    main_metric = "accuracy"

    def __init__(self, config):
        self.config = config
        self.train, self.val = paragraphs()

    def sources(self):
        train, val = Arrays(**self.train), Arrays(**self.val)
        train.class_names = val.class_names = ["prose", "code"]
        return train, val

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def evaluation_example(self, sample):
        label = losses.require_classes(sample["label"], self.config.num_classes)
        return {"inputs": {"text": sample["text"]}, "targets": label}

    def build_model(self):
        """Text, a string -> logits of the classes; the vocabulary is part of the model."""
        text = keras.Input((), dtype="string", name="text")
        numbers = keras.layers.TextVectorization(
            VOCABULARY,
            standardize="lower",
            output_sequence_length=WORDS,
            name="words",
        )
        numbers.adapt(self.train["text"])
        words = numbers(text)
        encoder = small_bert()
        add_lora(encoder)
        vectors = encoder(words)
        known = keras.ops.cast(words > 0, vectors.dtype)[..., None]
        count = keras.ops.maximum(keras.ops.sum(known, axis=1), 1.0)
        mean = keras.ops.sum(vectors * known, axis=1) / count
        logits = keras.layers.Dense(
            self.config.num_classes, dtype=wide(), name="logits"
        )(mean)
        return keras.Model({"text": text}, logits, name="text")

    def loss(self, outputs, targets):
        weights = self.config.class_weight_list
        return losses.cross_entropy(outputs, targets, class_weights=weights)

    def sums(self, outputs, targets):
        hits = tf.argmax(outputs, axis=-1) == targets
        return {
            "hits": tf.math.count_nonzero(hits),
            "samples": tf.size(targets, tf.int64),
        }

    def metrics(self, sums):
        return {"accuracy": float(sums["hits"] / sums["samples"])}


def small_bert():
    """Numbers of words [WORDS], 0: none -> their vectors [WORDS, WIDTH].

    BERT (Devlin et al. 2018, arXiv:1810.04805), made small.
    """
    words = keras.Input((WORDS,), dtype="int64", name="numbers")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, name="embed")(words)
    x = (
        x
        + keras.layers.Embedding(WORDS, WIDTH, name="places")(keras.ops.arange(WORDS))[
            None
        ]
    )
    x = keras.layers.LayerNormalization(name="norm")(x)
    mask = keras.ops.expand_dims(words > 0, axis=1)
    for number in range(LAYERS):
        attention = keras.layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, use_bias=False, name=f"attention{number}"
        )
        y = attention(x, x, attention_mask=mask)
        x = keras.layers.LayerNormalization(name=f"norm{number}a")(x + y)
        y = keras.layers.Dense(4 * WIDTH, "gelu", name=f"mlp{number}a")(x)
        y = keras.layers.Dense(WIDTH, name=f"mlp{number}b")(y)
        x = keras.layers.LayerNormalization(name=f"norm{number}b")(x + y)
    return keras.Model(words, x, name="encoder")


def add_lora(encoder):
    """Factors for the queries and values of each attention; all else stays as it is."""
    for layer in encoder.layers:
        if isinstance(layer, keras.layers.MultiHeadAttention):
            layer.query_dense.enable_lora(RANK)
            layer.value_dense.enable_lora(RANK)
            layer.key_dense.trainable = False
            layer.output_dense.trainable = False
        else:
            layer.trainable = False


def paragraphs():
    """Of the manual: texts and labels, to train on and to score; whole topics are held out."""
    parts = [{"text": [], "label": []}, {"text": [], "label": []}]
    for number, topic in enumerate(pydoc_data.topics.topics.values()):
        part = parts[number % HELD_OUT == 0]
        for paragraph in topic.split("\n\n"):
            if len(paragraph.split()) > 3:
                part["text"].append(" ".join(textwrap.dedent(paragraph).split()))
                part["label"].append(int(paragraph.startswith("   ")))
    return [{name: np.array(column) for name, column in part.items()} for part in parts]
