r"""SegFormer of keras_hub for masks, in the place of this project's own networks.

    pip install --no-deps keras-hub regex tokenizers sentencepiece
    hvdkit example segformer
    horovodrun -np 2 python train.py --flagfile=configs/demo.cfg --task=segformer \
        --run_dir=runs/segformer

It is for a project of segmentation, whose task it inherits: data, augmentation, loss, scores. Its
network takes pictures of one size: score larger ones by --eval_window or --eval_crop of
--image_size. (With all that keras-hub asks for, pip would put tensorflow beside tensorflow-cpu, and
break both.)

Seen after --num_steps=500 on two ranks: loss 0.46, mIoU 0.13. Without published weights it begins
slowly.
"""

import keras
import keras_hub

from hvdkit.train.preprocessing import scaled, wide
from tasks import segmentation

# Four small stages. Those of b0 (arXiv:2105.15203) are (32, 64, 160, 256) and (2, 2, 2, 2).
WIDTHS = (16, 32, 64, 96)
DEPTHS = (1, 1, 1, 1)


class Task(segmentation.Task):
    stride = 32

    def build_model(self):
        """Image [B, size, size, 3] -> logits [B, size, size, classes]; a multiple of 32."""
        shape = (self.config.image_size, self.config.image_size, 3)
        # Published weights of b0: keras_hub.models.MiTBackbone.from_preset("mit_b0_ade20k_512").
        encoder = keras_hub.models.MiTBackbone(
            layerwise_depths=DEPTHS,
            num_layers=4,
            layerwise_num_heads=(1, 2, 4, 8),
            layerwise_sr_ratios=(8, 4, 2, 1),
            max_drop_path_rate=0.0,
            layerwise_patch_sizes=(7, 3, 3, 3),
            layerwise_strides=(4, 2, 2, 2),
            hidden_dims=WIDTHS,
            image_shape=shape,
        )
        backbone = keras_hub.models.SegFormerBackbone(
            encoder, projection_filters=WIDTHS[-1]
        )
        segmenter = keras_hub.models.SegFormerImageSegmenter(
            backbone, self.config.num_classes
        )
        # Dropout draws by rank, and weights would depend on the number of ranks.
        for layer in segmenter._flatten_layers():
            if isinstance(layer, keras.layers.Dropout):
                layer.rate = 0.0
        image = keras.Input(shape, name="image")
        # The network asks for the size while it is traced; batches do not say theirs.
        sized = keras.ops.reshape(image, (-1, *shape))
        logits = segmenter(scaled(sized))
        return keras.Model(
            {"image": image}, keras.ops.cast(logits, wide()), name="segformer"
        )
