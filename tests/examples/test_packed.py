"""examples/packed: each sequence is in one window, and has the scores that it has alone."""

import importlib.util

import numpy as np

from ranks import ROOT


def test_a_packed_sequence_has_the_scores_that_it_has_alone():
    spec = importlib.util.spec_from_file_location("packed", ROOT / "examples/packed/task.py")
    spec.loader.exec_module(example := importlib.util.module_from_spec(spec))
    texts = [bytes([n]) * length for n, length in enumerate((50, 3, 129, 40, 30, 1, 5, 200, 77), 1)]
    together = example.packed(texts)
    assert len(together) == 5  # 535 bytes fill 4.1 windows
    windows = together._arrays
    found = np.bincount(windows["tokens"][windows["sequence"] > 0], minlength=10)[1:]
    assert found.tolist() == [len(text) for text in texts]

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
    first = {n: a[0] for n, a in example.packed(texts[:2])._arrays.items()}
    assert np.count_nonzero(task.evaluation_example(first)["targets"]["counts"]) == 49 + 2
