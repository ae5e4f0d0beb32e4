"""Which of two scores is better: whatever compares scores asks here. Imports no TensorFlow."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MODES = ("min", "max")
# Settings that make another loss, by their defaults: where the loss is the metric, they are part of
# what scores measure, if they are set.
OF_LOSS = {"label_smoothing": 0.0, "class_weights": ""}
# Words that name an error, of which the lowest is the best.
_ENDINGS = """
    loss losses error errors entropy perplexity distance divergence deviation distortion likelihood
    latency residual mae mse mape
"""
_WORDS = """
    err rmse rmsd msle rmsle medae wape wmape mase mre rel l1 l2 ppl bpc bpb bpd nll bce ce ece
    brier crps hinge huber kl kld jsd mmd emd dist wasserstein levenshtein hausdorff chamfer
    wer cer ter mer der eer fpr fnr far frr epe mpjpe fid kid lpips false miss missed misses
    mistakes wrong misclassification cost costs penalty regret residuals risk rms ade fde nme bits
    nats bpp hd95 asd assd fad fvd frechet mcd sse pinball hamming owa rmspe mspe mpe medape mdape
    rse rrse rae rmsse msse silog mce aurc eaurc rpe ate mpvpe pehe lsd dtw ged niqe brisque
    dists ergas dcf hter apcer acer ser wql msis
"""
# Words that name an error at a name's end: of val_per and mean_rank, not of per_class_recall.
_LAST_WORDS = "per rank sql"


class Score(NamedTuple):
    """An evaluation of the weights, as one number.

    `loss`: over the validation set. `since`: the first step of the run with as good a value, from
    which early stopping counts.
    """

    value: float
    step: int
    loss: float
    since: int


class MainMetric(NamedTuple):
    """The figure by which a task's weights are compared.

    `mode`: "max" where the highest score is the best, "min" where the lowest is.
    """

    name: str
    mode: str = "max"

    def height(self, score: float) -> float:
        """A number of which the highest is the best; the height of that number is the score."""
        return -score if self.mode == "min" else score

    def is_better(self, score: float, other: float) -> bool:
        return self.height(score) > self.height(other)

    def rank(self, score: Score) -> tuple[float, float, int]:
        """The best score has the highest rank: of equal values the lower loss, then the newer."""
        loss = math.inf if math.isnan(score.loss) else score.loss
        return self.height(score.value), -loss, score.step

    def describe(self) -> str:
        return (
            f"{self.name} (the lowest is the best)" if self.mode == "min" else self.name
        )


def of_task(task: Any) -> MainMetric:
    """The main metric that a task names. Raises ValueError: its direction is not known."""
    name = task.main_metric
    if hasattr(task, "main_metric_mode"):
        mode = task.main_metric_mode
        if mode in MODES:
            return MainMetric(name, mode)
        raise ValueError(
            f"main_metric_mode = {mode!r} is neither: set main_metric_mode = "
            f'"min" where the lowest {name} is the best, else "max"'
        )
    if _names_an_error(name):
        raise ValueError(
            f'main_metric = "{name}" may be an error: set main_metric_mode = '
            f'"min" where the lowest {name} is the best, else "max"'
        )
    return MainMetric(name)


def none_is_best(name: str) -> str:
    """A sentence for a run none of whose scores, of this name, is a finite number."""
    return f"no checkpoint is the best: {name} was NaN or infinite at each evaluation"


def of_measure(measure: Mapping[str, Any]) -> MainMetric:
    """The main metric of scores, by what they measure (hvdkit/checkpoint/checkpoints.py)."""
    return MainMetric(
        measure.get("main_metric", ""), measure.get("main_metric_mode", "max")
    )


def _names_an_error(name: str) -> bool:
    """Whether a word of the name is an error's: of val_mae, meanSquaredError, WER, logloss."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    if words and words[-1].lower() in _LAST_WORDS.split():
        return True
    words += re.findall(r"[A-Za-z0-9]+", name)  # This pattern keeps digits, as in l1.
    words = [word.lower() for word in words]
    endings = tuple(_ENDINGS.split())
    return any(word in _WORDS.split() or word.endswith(endings) for word in words)
