"""Names under which Keras saves this package's layers in a model file, and finds them again."""

import keras

_PACKAGE = "hvdkit"
_OLD_PACKAGE = "engine"  # in model files of older versions


def register(layer: type[keras.layers.Layer]) -> type[keras.layers.Layer]:
    """A decorator: `keras.saving.load_model` then finds the class without `custom_objects`."""
    keras.saving.get_custom_objects()[f"{_OLD_PACKAGE}>{layer.__name__}"] = layer
    return keras.saving.register_keras_serializable(package=_PACKAGE)(layer)
