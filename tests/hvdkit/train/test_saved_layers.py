"""Model files that hold this package's layers."""

import keras
import pytest

from hvdkit.train.layers.batch_norm import SyncBatchNormalization
from hvdkit.train.layers.dropout import SampleDropout
from hvdkit.train.layers.preprocessing import Preprocess


@pytest.mark.parametrize("package", ["hvdkit", "engine"])
def test_a_model_file_finds_the_layers_by_the_packages_name_and_by_its_old_one(package):
    image = keras.Input((4, 4, 3))
    key = keras.Input((2,), dtype="int32")
    x = SyncBatchNormalization()(Preprocess()(image))
    model = keras.Model([image, key], SampleDropout(0.5)([x, key]))
    saved = model.to_json()
    for layer in (Preprocess, SyncBatchNormalization, SampleDropout):
        assert f'"hvdkit>{layer.__name__}"' in saved
    loaded = keras.models.model_from_json(saved.replace('"hvdkit>', f'"{package}>'))
    kinds = [type(layer) for layer in loaded.layers]
    assert {Preprocess, SyncBatchNormalization, SampleDropout} <= set(kinds)
