"""examples/packed: each sequence is in one window, and has the scores that it has alone."""

import importlib.util

import numpy as np

from ranks import ROOT


def test_a_packed_sequence_has_the_scores_that_it_has_alone():
    spec = importlib.util.spec_from_file_location(
        "packed", ROOT / "examples/packed/task.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    lengths = (50, 3, 129, 40, 30, 1, 5, 200, 77)
    texts = []
    for number, length in enumerate(lengths, start=1):
        texts.append(np.full(length, number, np.uint8).tobytes())
    together = example.packed(texts)
    assert len(together) == 5  # 535 bytes fill 4.1 windows
    windows = together._arrays
    counts = np.bincount(windows["tokens"][windows["sequence"] > 0], minlength=10)
    assert counts[1:].tolist() == list(lengths)

    task = example.Task(None)
    model = task.build_model()

    def scores(windows, row):
        inputs = {name: array[row : row + 1, :-1] for name, array in windows.items()}
        return model(inputs).numpy()[0]

    for text in (texts[0], texts[3], texts[4]):
        row, column = np.argwhere(windows["tokens"] == text[0])[0]
        alone = scores(example.packed([text])._arrays, 0)[: len(text)]
        packed = scores(windows, row)[column : column + len(text)]
        np.testing.assert_allclose(packed, alone[: len(packed)], atol=1e-5)
    two_texts = example.packed(texts[:2])
    first = {name: array[0] for name, array in two_texts._arrays.items()}
    assert (
        np.count_nonzero(task.evaluation_example(first)["targets"]["counts"]) == 49 + 2
    )
