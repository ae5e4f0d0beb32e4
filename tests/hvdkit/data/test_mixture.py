"""Sets with shares: what an epoch of them holds, and that each sample is its set's."""

from collections import Counter

import numpy as np
import pytest
import readers
from refusals import refused

from hvdkit.data.mixture import Mixture
from hvdkit.data.prepare import pack
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.readers.records import Records
from hvdkit.data.source import Arrays, Synthetic


def numbers(first: int, count: int) -> Arrays:
    return Arrays(label=np.arange(first, first + count))


@pytest.mark.parametrize(
    ("sizes", "shares", "expected"),
    [
        ((6, 2), (3, 1), (6, 2)),
        ((4, 100, 3), (0.25, 0.5, 0.25), (50, 100, 50)),
        ((3, 7), (1, 3), (3, 9)),
        ((10, 10), (1, 1.001), (10, 11)),
    ],
)
def test_an_epoch_has_every_sample_in_these_shares(sizes, shares, expected):
    sets = [numbers(1000 * number, size) for number, size in enumerate(sizes)]
    mixed = Mixture(*zip(sets, shares))
    counts = Counter(int(sample["label"]) for sample in readers.read_all(mixed))
    for number, (size, count) in enumerate(zip(sizes, expected)):
        times = [counts[1000 * number + n] for n in range(size)]
        assert sum(times) == count and max(times) - min(times) <= 1 <= min(times)
    assert (
        mixed.fingerprint()
        != Mixture(*zip(sets, (*shares[1:], shares[0]))).fingerprint()
    )


def test_a_mixture_is_what_one_of_its_sets_is():
    digits = numbers(0, 4)
    digits.asks_mirror = True
    mixed = Mixture((digits, 1), (numbers(10, 4), 1))
    assert mixed.asks_mirror and not mixed.is_demo


def test_what_comes_once_more_is_spread_over_the_set():
    """Readers list class by class: repetitions of the first samples would be those of few."""
    mixed = Mixture((numbers(0, 3000), 3), (numbers(10_000, 600), 1))
    counts = Counter(int(sample["label"]) for sample in readers.read_all(mixed))
    by_class = [
        sum(counts[10_000 + 120 * number + n] for n in range(120))
        for number in range(5)
    ]
    assert by_class == [200] * 5


def test_packed_sets_are_read_ahead_and_others_alike(tmp_path):
    for name, seeds in (("a", (1, 2, 3)), ("b", (4,))):
        pictures = np.stack([readers.noise(seed) for seed in seeds])
        pack.pack(Arrays(image=pictures, label=np.array(seeds)), tmp_path, name)
    a = Records(tmp_path, "a")
    b = Records(tmp_path, "b")
    ahead = Mixture((a, 1), (b, 1))
    other = Mixture((a, 1), (b, 1))
    other.reads_ahead = False
    assert ahead.reads_ahead and ahead.num_classes == 5 and ahead.kind == "class"
    samples = readers.read_all(ahead)
    assert [int(sample["label"]) for sample in samples] == [1, 2, 3, 4, 4, 4]
    for one, two in zip(samples, readers.read_all(other), strict=True):
        np.testing.assert_array_equal(one["image"], two["image"])
        assert one["label"] == two["label"] and "file" not in two
    order = np.array([5, 0, 3, 2])
    parts = []
    for index in order:
        data, _ = ahead.fetch(np.array([index]))
        parts += [*data]
    assert [*ahead.fetch(order)[0]] == parts
    shard = next((tmp_path / "b").glob("*.tfrecord"))
    shard.write_bytes(shard.read_bytes()[:60])
    readers.explained(ahead, 4, shard, "record of sample 0")


def test_a_packed_set_and_loose_files_mix(tmp_path):
    """Before: kinds, or class names, that a set does not tell were others than the pack's."""
    readers.write_classes(tmp_path / "raw")
    readers.write_pairs(
        tmp_path, {"a": (readers.noise(1), np.zeros((12, 16), np.uint8))}
    )
    loose = [
        ClassFolders(tmp_path / "raw", "train"),
        ImageLabelFolder(tmp_path, "train", 2),
    ]
    for number, source in enumerate(loose):
        pack.pack(source, tmp_path / "packed", f"{number}")
        mixed = Mixture((source, 1), (Records(tmp_path / "packed", f"{number}"), 1))
        samples = readers.read_all(mixed)
        assert len(samples) == 2 * len(source)
        loose_samples = samples[: len(source)]
        packed_samples = samples[len(source) :]
        for one, two in zip(loose_samples, packed_samples, strict=True):
            np.testing.assert_array_equal(one["label"], two["label"])


def test_what_cannot_be_mixed_is_refused():
    form = {"label": ((), np.int32, 3)}
    named = Synthetic(3, form)
    named.class_names = ["a", "b"]
    refused(
        lambda: Mixture((named, 1), (Synthetic(3, form), 1)),
        "class_names",
        "['a', 'b'], []",
    )
    refused(lambda: Mixture((named, 0)), "shares", "[0]")
    unlike = Mixture((Synthetic(3, form), 1), (Arrays(label=np.arange(3)), 1))
    refused(
        lambda: readers.read_all(unlike),
        "unlike samples",
        "int32, rank 0",
        "int64, rank 0",
    )
