"""Virtual ranks: one run on 1, 2 and 3 real ranks; what fixed point keeps and what it tells."""

from __future__ import annotations

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit import settings as settings_lib
from hvdkit.checkpoint.checkpoints import changes
from hvdkit.checkpoint.files import Manifest
from hvdkit.data.sampler import Sampler
from hvdkit.settings import project
from hvdkit.train import fixed_point, virtual
from hvdkit.train.dropout import Seeds
from ranks import CHECKS, names_of_checks, run_checks

FILE = CHECKS / "checks_virtual.py"
# In this order: what 2 ranks began is ended by 3.
LAUNCHES = [(1, "alone"), (2, "mpirun"), (3, "gloo")]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """By launch: what failed, and what its runs left; made once."""
    folder = tmp_path_factory.mktemp("virtual")
    failures, left = {}, {}
    for ranks, backend in LAUNCHES:
        name = f"{ranks}-{backend}"
        env = {"VIRTUAL_RUNS": str(folder), "VIRTUAL_LAUNCH": name}
        failures[name] = run_checks([FILE], ranks, backend, timeout=500, env=env)
        found = folder / f"{name}.json"
        left[name] = json.loads(found.read_text()) if found.exists() else {}
    return failures, left


# The first waits for all launches: a minute each, and several on a busy machine.
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", names_of_checks(FILE))
@pytest.mark.parametrize("launch", [f"{ranks}-{backend}" for ranks, backend in LAUNCHES])
def test_on_ranks(launch, name, launches):
    failure = launches[0][launch][name]
    assert failure is None, failure


@pytest.mark.timeout(2400)
def test_weights_and_records_are_the_same_bits_on_any_number_of_ranks(launches):
    _, left = launches
    for launch, runs in left.items():
        for name, (sha, records) in runs.items():
            # Handed on from 2 ranks to 3 it is the run that nobody interrupted.
            first = left["1-alone"]["adam" if name == "handed on" else name]
            assert [sha, records] == first, f"{name} on {launch}"
    assert "handed on" in left["3-gloo"] and len(left["1-alone"]) == 5


# ---- Dealing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "micro_batches", "count"), [(10, 1, 4), (24, 2, 5), (7, 1, 7)])
def test_a_virtual_rank_holds_the_same_samples_whoever_computes_it(batch, micro_batches, count):
    def dealt(size):
        """By virtual rank: positions of its samples at step 3."""
        found = {}
        for rank in range(size):
            order = Sampler(50, batch, micro_batches, 1, rank, size, count)
            own = order.local_positions(tf.constant(3)).numpy()
            own = own.reshape(micro_batches, order.local_micro_size)
            for part in virtual.shares(batch // micro_batches, count, rank, size):
                assert part.number not in found
                found[part.number] = own[:, part.first : part.first + part.size].tolist()
        return found

    one = dealt(1)
    assert len(one) == count
    assert len({len(own[0]) for own in one.values()}) <= 2
    everything = sorted(x for own in one.values() for row in own for x in row)
    assert everything == list(range(3 * batch, 4 * batch))
    assert all(dealt(size) == one for size in range(2, count + 1))


# ---- Fixed point -------------------------------------------------------------------------------


ONE = tf.constant(1.0)


def fixed_sum(parts, order):
    """As a step adds them up and takes them apart again."""
    total = None
    for i in order:
        total = fixed_point.add_gradients(total, tf.constant(parts[i]), len(parts), ONE)
    one = tf.constant(1.0, tf.float64)
    (whole,) = fixed_point.unpack_gradients(total, one, [total.shape], tf.float64)
    return whole.numpy()


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 100.0])
def test_sums_are_those_of_float64_in_any_order(size):
    parts = np.random.default_rng(1).normal(scale=size, size=(12, 500)).astype(np.float32)
    total = fixed_sum(parts, range(12))
    # Each addend is rounded to the grid, by half a unit at most.
    np.testing.assert_allclose(total, parts.astype(np.float64).sum(0), rtol=0, atol=6 * 2.0**-48)
    np.testing.assert_array_equal(total, fixed_sum(parts, reversed(range(12))))


def test_gradients_down_to_the_grid_are_kept_and_float32_is_whole_above_it():
    tiny = np.float32([1e-12, -3e-13, 2.0**-48])
    np.testing.assert_allclose(fixed_sum([tiny] * 4, range(4)) / 4, tiny, atol=2.0**-49)
    whole = np.float32([1 / 3, 2.0**-24 * 1.1, -1e2 / 3])
    np.testing.assert_array_equal(fixed_sum([whole] * 4, range(4)), 4 * whole.astype(np.float64))


def both(values, addends, scale=1.0):
    """By TensorFlow's own operations and by XLA: they must agree to the bit."""
    values, scale = tf.constant(values), tf.constant(scale)
    plain = fixed_point.to_fixed(values, 48, addends, scale).numpy()
    np.testing.assert_array_equal(
        fixed_point.add_gradients(None, values, addends, scale).numpy(), plain
    )
    return plain


@pytest.mark.parametrize("addends", [1, 4, 12, 1000])
@pytest.mark.parametrize("scale", [1.0, 2.0**15])
def test_what_cannot_be_added_is_told_and_nothing_wraps(addends, scale):
    largest = 2.0**14 / addends
    fine = np.array([largest, -largest]) * scale
    assert all(fixed_point.judge(tf.constant(fine), addends, scale))
    assert (abs(both(fine, addends, scale).astype(object)) * addends < 2**63).all()
    for bad in (np.nextafter(largest, np.inf), -1e300, np.inf, -np.inf, np.nan):
        values = np.array([1.0, bad, 1.0, 0.5]) * scale
        for turned in (values, values[::-1]):  # where it stands must not matter
            judged = fixed_point.judge(tf.constant(turned), addends, scale)
            assert [bool(x) for x in judged] == [bool(np.isfinite(bad)), False, True]
        assert both(values, addends, scale).tolist() == [2**48, 0, 2**48, 2**47]


@pytest.mark.parametrize("length", [3, 1000, 100_003])
def test_one_number_that_is_none_is_found_among_many(length):
    for place in {0, length // 2, length - 1}:
        for bad in (np.nan, np.inf, -np.inf):
            values = np.random.default_rng(place).normal(size=length).astype(np.float32)
            values[place] = bad
            assert not any(fixed_point.judge(tf.constant(values), 4, 1.0)[:2])


def test_the_loss_scale_is_taken_out_without_rounding():
    g = np.float32([1 / 3, -1e-6])
    for scale in (2.0**-10, 2.0**24):
        np.testing.assert_array_equal(both(g * np.float32(scale), 4, scale), both(g, 4))


def test_xla_rounds_as_numpy_does():
    """To the nearest, halves to even."""
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999999999999994, 2.0**51 + 0.5])
    assert both(halves * 2.0**-48, 4).tolist() == np.rint(halves).astype(np.int64).tolist()


def test_tensors_of_any_kind_are_packed_without_rounding():
    parts = [tf.constant([[1 / 3, 2.0]], t) for t in (tf.bfloat16, tf.float16, tf.float32)]
    flat = fixed_point.pack(parts)
    assert flat.dtype == tf.float32 and flat.shape == [6]
    np.testing.assert_array_equal(
        flat, np.concatenate([np.ravel(tf.cast(p, tf.float32)) for p in parts])
    )
    assert fixed_point.pack([*parts, tf.constant(1 / 3, tf.float64)]).numpy()[-1] == 1 / 3


def test_state_of_any_size_is_averaged_exactly():
    values = np.float32([1e-9, 0.3, 1.0, 65025.3, 3e9, -7e-4]).astype(np.float64)
    whole = fixed_point.state_to_fixed(tf.constant(values), 64)
    mean = fixed_point.state_from_fixed(tf.add_n([whole] * 64)) / 64
    np.testing.assert_array_equal(np.float32(mean), np.float32(values))
    limit = 2.0**42 / 64
    for value, fits in ((limit, True), (-limit, True), (limit * 1.01, False), (np.nan, False)):
        assert bool(fixed_point.judge_state(tf.constant([value], tf.float64), 64)[1]) == fits


# ---- Seeds -------------------------------------------------------------------------------------


def test_no_two_generators_virtual_ranks_or_steps_share_a_seed():
    layers = [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0), keras.layers.Dropout(0.1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    seeds, found = Seeds(5, model), []
    for step in (0, 1, 2, 2**31):
        for number in range(4):
            seeds.assign(tf.constant(step, tf.int64), tf.constant(number, tf.int64))
            found += [tuple(v.numpy().tolist()) for v in seeds.variables]
    assert len(set(found)) == len(found) == 4 * 4 * 3
    assert all(0 <= word < 2**31 - 2 for state in found for word in state)


# ---- Settings ----------------------------------------------------------------------------------


def parse(*flags):
    return settings_lib.parse(
        ["train.py", "--flagfile=configs/demo.cfg", "--virtual_ranks=4", *flags]
    )


def test_it_brings_determinism_and_one_thread_and_says_so(monkeypatch):
    monkeypatch.chdir(project.folder())
    config = parse()
    assert config.deterministic and config.cpu_threads == 1
    assert parse("--cpu_threads=2").cpu_threads == 2
    assert any("--deterministic and --cpu_threads=1" in note for note in config.notes())


def test_a_resume_names_what_makes_other_bits_but_not_the_number_of_ranks(monkeypatch):
    monkeypatch.chdir(project.folder())
    before = Manifest(5, dataclasses.asdict(parse()), 2, "", "", {})
    assert changes(before, parse(), 3, normed=True) == []
    found = changes(before, parse("--virtual_ranks=6", "--cpu_threads=2"), 3, normed=True)
    assert found == ["--virtual_ranks was 4, is 6", "--cpu_threads was 1, is 2"]


@pytest.mark.parametrize(
    ("flags", "ranks", "words"),
    [
        ("", 5, ["--virtual_ranks=4", "5 ranks", "at most 4", "--virtual_ranks=5"]),
        ("--bn_sync=full", 3, ["--bn_sync=full", "--virtual_ranks=4", "3 rank", "start 4 ranks"]),
    ],
)
def test_what_so_many_ranks_cannot_do_is_refused(flags, ranks, words, monkeypatch):
    monkeypatch.chdir(project.folder())
    config = parse(*flags.split())
    with pytest.raises(ValueError) as error:
        config.for_ranks(ranks)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert config.for_ranks(4) == config


@pytest.mark.parametrize(
    "flag",
    [
        "--compression=fp16",
        "--pack_bytes=1000",
        "--gradient_groups=1",
        "--batch_per_rank=8",
        "--lr_scaling=linear",
        "--bn_sync=moments",
        "--bn_sync=none",
        "--global_batch_size=3",
    ],
)
def test_what_has_no_place_beside_it_is_refused_by_name(flag, monkeypatch):
    monkeypatch.chdir(project.folder())
    with pytest.raises(ValueError) as error:
        parse(flag)
    name = flag.split("=")[0]
    assert name in str(error.value) and "--virtual_ranks=4" in str(error.value)
    assert "\n" not in str(error.value)


def test_gradients_that_are_too_small_are_told_only_where_they_are():
    assert virtual.too_small({"step": 3}) is None
    assert virtual.too_small({"step": 3, "faults": [True, True, True, False]}) is None
    assert "at step 3" in virtual.too_small({"step": 3, "faults": [False, False, False, True]})


def test_gradients_are_added_as_whole_numbers_of_the_grid():
    """0.5 and -0.25 of a grid of 2**-48; the first addend, and one more."""
    flat, scale = tf.constant([0.5, -0.25]), tf.constant(1.0, tf.float64)
    one = fixed_point.add_gradients(None, flat, 2, scale)
    assert one.numpy().tolist() == [2**47, -(2**46)]
    both = fixed_point.add_gradients(one, flat, 2, scale)
    assert both.numpy().tolist() == [2**48, -(2**47)]
