"""The state of a run: model, optimizer, step, loss scale, what the task holds; averaged weights.

Names of variables come from the model's structure alone, so that checkpoints fit. Keras counts the
layers that it names itself over the whole process (conv2d_5, seed_generator_7), so its paths depend
on what else was made before, and a copied or loaded model has other paths again.
"""

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src.utils.naming import to_snake_case

from hvdkit.ranks.world import raw
from hvdkit.train.layers import dropout
from hvdkit.train.optim.optimizer import UpdateRule
from hvdkit.train.optim.plateau import Plateau
from hvdkit.train.step.gradients import LossScale

Variable: TypeAlias = keras.Variable | tf.Variable
_MADE_ANEW = (keras.optimizers.Optimizer, keras.Metric, keras.random.SeedGenerator)


class TaskState:
    """What the attributes of a task hold, also in lists, tuples and dicts.

    Attributes:
      of_task: by name, what layers, optimizers, metrics, seed generators and modules hold, and
        variables themselves: task/teacher/0003/dense/kernel, task/queues/0/0000.
      of_new_run: the beginnings of the names of those that a new run makes anew, whatever weights
        it begins with: of optimizers, metrics and seed generators.
      variables: these, the fingerprint of each lookup table, table/0000, and by what a LoRA layer
        multiplies its factors, lora/ and the name of the first.
      layers: all of the model and of the task, at any depth.
      generators: their seed generators. One that the task holds by itself may draw outside of
        forward passes too, so it draws alike on all ranks.
    """

    def __init__(
        self, task: Any, model: keras.Model, others: Iterable[Variable] = ()
    ) -> None:
        """`others`: variables that have names of their own, besides the model's."""
        self.of_task: dict[str, Variable] = {}
        self.of_new_run: list[str] = []
        self._seen = {id(raw(v)) for v in (*model.variables, *others)}
        self._roots = [model]
        attributes = vars(task) if task else {}
        self._visit(dict(sorted(attributes.items())), "task")
        layers = {}
        for root in self._roots:
            for layer in root._flatten_layers():
                layers[id(layer)] = layer
        self.layers = list(layers.values())
        self.generators = dropout.generators(self.layers)
        self.variables = dict(self.of_task)
        self._tables: list[tuple[keras.Layer, tf.Variable]] = []
        for layer in self.layers:
            fingerprint = _table(layer)
            if fingerprint is not None:
                variable = tf.Variable(fingerprint, trainable=False, dtype=tf.int64)
                self.variables[f"table/{len(self._tables):04d}"] = variable
                self._tables.append((layer, variable))
        names = {id(raw(v)): name for name, v in self.of_task.items()}
        for number, (variable, name) in enumerate(
            zip(model.variables, names_of_model(model))
        ):
            names[id(raw(variable))] = f"{number:04d}/{name}"
        self._scales: dict[int, tf.Variable] = {}  # by the id of the first factor
        for _, first, scale in lora_factors(self.layers):
            variable = tf.Variable(scale, trainable=False, dtype=tf.float64)
            self.variables[f"lora/{names[id(raw(first))]}"] = variable
            self._scales[id(first)] = variable

    @property
    def tables(self) -> list[keras.Layer]:
        """Layers with a vocabulary or boundaries."""
        return [layer for layer, _ in self._tables]

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            for key, part in value.items():
                self._visit(part, f"{name}/{key}")
            return
        for place, (variable, ending) in enumerate(_variables_of(value)):
            if id(raw(variable)) not in self._seen:
                self._seen.add(id(raw(variable)))
                self.of_task[f"{name}/{place:04d}{ending}"] = variable
        if isinstance(value, keras.Layer):
            self._roots.append(value)
        if isinstance(value, _MADE_ANEW):
            self.of_new_run.append(name)

    def finalize(self) -> None:
        """Call it once variables were restored, broadcast or loaded, before anything is traced.

        Layers such as Keras's Normalization compute with constants that they make of variables.

        Raises:
          ValueError: a lookup table or a LoRA layer's factor, which no variable of the layer holds,
            is not as on rank 0 or when saved.
        """
        for layer in self.layers:
            finalize_state = getattr(layer, "finalize_state", None)
            if finalize_state:
                finalize_state()
        for layer, fingerprint in self._tables:
            # Checkpoints before 2026-12 leave out frequencies.
            tables = (_table(layer), _table(layer, with_frequencies=False))
            if int(fingerprint) not in tables:
                raise ValueError(
                    f"{layer.path or layer.name} has another vocabulary, other frequencies or "
                    "other boundaries than on rank 0, or than when the checkpoint was written: "
                    "give them to the layer, or adapt it on the same data on every rank and at "
                    "every start"
                )
        for layer, first, scale in lora_factors(self.layers):
            known = float(self._scales[id(first)])
            if known != scale:
                raise ValueError(
                    f"{layer.path or layer.name} multiplies its LoRA factors by {scale:g} "
                    f"(lora_alpha / rank), not by {known:g} as on rank 0, or than when the "
                    "checkpoint was written"
                )


def lora_factors(
    layers: Iterable[keras.Layer],
) -> list[tuple[keras.Layer, Variable, float]]:
    """LoRA layers, the first of the factors that each adds to its kernel, what multiplies them."""
    factors = []
    for layer in layers:
        if getattr(layer, "lora_enabled", False):
            first = getattr(layer, "lora_kernel_a", None)
            if first is None:
                first = getattr(layer, "lora_embeddings_a", None)
            if first is not None:
                factors.append((layer, first, layer.lora_alpha / layer.lora_rank))
    return factors


def _variables_of(value: Any) -> list[tuple[Variable, str]]:
    """The variables of an object that a task holds, and the endings of their names."""
    if isinstance(value, keras.Layer):
        return [
            (v, f"/{name}") for v, name in zip(value.variables, names_of_model(value))
        ]
    if isinstance(value, (keras.Variable, tf.Variable)):
        return [(value, "")]
    if isinstance(value, keras.random.SeedGenerator):
        return [(value.state, "")]
    if isinstance(value, (keras.Metric, keras.optimizers.Optimizer, tf.Module)):
        return [(v, "") for v in value.variables]
    return []


def _table(layer: keras.Layer, *, with_frequencies: bool = True) -> int | None:
    """63 bits of a layer's vocabulary, with its frequencies, or boundaries; None: it has none."""
    entries = getattr(layer, "bin_boundaries", None)
    if entries is None and hasattr(layer, "get_vocabulary"):
        entries = layer.get_vocabulary()
    if entries is None:
        return None
    # Of TF-IDF the layer computes with constants that it makes of these.
    frequencies = getattr(layer, "idf_weights", None)
    if frequencies is not None and with_frequencies:
        numbers = tf.reshape(frequencies, [-1]).numpy().tolist()
        # Other processors may round the last digits of a logarithm otherwise.
        entries = [*entries, *[f"{number:.5g}" for number in numbers]]
    digest = hashlib.sha256(repr([str(entry) for entry in entries]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class State:
    """What a checkpoint holds and a start-up broadcasts.

    `step` is the one counter of the run: it picks the batch and the learning rate and says when
    the run ends. It counts global batches; `skipped` of them changed no weights because their
    gradients were not finite.
    """

    def __init__(
        self,
        model: keras.Model,
        rule: UpdateRule,
        precision: str,
        *,
        task: Any = None,
    ) -> None:
        self.model = model
        self.optimizer = rule.optimizer
        self.averages = rule.averages
        self.task_state = TaskState(task, model, self.optimizer.variables)
        self._of_model = model.variables
        self.loss_scale = LossScale(precision)
        self.plateau = Plateau()
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.skipped = tf.Variable(0, dtype=tf.int64, trainable=False, name="skipped")

    @property
    def variables(self) -> dict[str, keras.Variable | tf.Variable]:
        """Every variable by a name that is unique and the same on every rank and in every process.

        model/0003/dense/kernel, its moving average ema/0/0003/dense/kernel where there is one, of
        the first group, which had ema_updates/0; optimizer/0007/adam/dense/kernel/momentum.
        """
        named = {
            "step": self.step,
            "skipped": self.skipped,
            "loss_scale": self.loss_scale.value,
            "sound_steps": self.loss_scale.sound_steps,
            "skipped_in_a_row": self.loss_scale.skipped_in_a_row,
            **self.plateau.variables,
        }
        names: dict[int, str] = {}  # by the variable's id
        # The position makes a name unique: two layers may have been given the same one.
        places: dict[int, str] = {}
        of_model = zip(self.model.variables, names_of_model(self.model))
        for number, (variable, name) in enumerate(of_model):
            names[id(variable)] = name
            places[id(variable)] = f"{number:04d}/{name}"
            named[f"model/{number:04d}/{name}"] = variable
        for number, average in enumerate(self.averages):
            named[f"ema_updates/{number}"] = average.updates
            for weight, value in average.pairs:
                named[f"ema/{number}/{places[id(weight)]}"] = value
        slots = _names_of_optimizer(self.optimizer, names)
        for number, (variable, name) in enumerate(zip(self.optimizer.variables, slots)):
            named[f"optimizer/{number:04d}/{name}"] = variable
        return named | self.task_state.variables

    @property
    def untrained(self) -> list[tf.Variable]:
        """What the optimizer does not train, of the model and of the task."""
        return [
            raw(v)
            for v in [
                *self.model.non_trainable_variables,
                *self.task_state.of_task.values(),
            ]
        ]

    @property
    def of_forward(self) -> list[tf.Variable]:
        """What a forward pass may change: moving statistics, seeds, counters, queues."""
        frozen = [v for v in self.task_state.of_task.values() if not v.trainable]
        return [raw(v) for v in [*self.model.non_trainable_variables, *frozen]]

    @property
    def updated(self) -> list[tf.Variable]:
        """What `apply` changes besides the weights."""
        variables = [raw(v) for v in self.optimizer.variables]
        for average in self.averages:
            variables += [average.updates, *[value for _, value in average.pairs]]
        return variables

    def apply(
        self, grads: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """One update of weights, by these gradients, and of their averages."""
        self.optimizer.apply(grads, variables)
        for average in self.averages:
            average.follow(variables)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, weights are their averages; afterwards their own again.

        It takes the memory of a second copy of the weights. Weights without an average, or before
        its first update, stay, and so do batch norm's moving statistics.
        """
        pairs = []
        for average in self.averages:
            if int(average.updates):
                pairs += average.pairs
        with unchanged([raw(weight) for weight, _ in pairs]):
            for weight, value in pairs:
                raw(weight).assign(value)
            yield

    def trainable_flags(self) -> list[bool]:
        return [v.trainable for v in self._of_model]

    def advance(self, finite: tf.Tensor, readable: tf.Tensor) -> None:
        """After a step, inside its tf.function: a batch that no rank could read is not counted."""
        counted = tf.cast(readable, tf.int64)
        self.step.assign_add(counted)
        self.skipped.assign_add(tf.cast(~finite, tf.int64) * counted)
        self.loss_scale.update(finite, readable)


@contextlib.contextmanager
def unchanged(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Restores them afterwards.

    A layer may count in evaluation too, and Keras's recurrent ones draw dropout masks. Ranks have
    different batches: each begins with the same state, and so does training, after any number.
    """
    before = [(v, tf.identity(v)) for v in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def leave_zero(weights: Sequence[tf.Variable]) -> None:
    """Weights that are all zeros become others, the same on every rank; for trials.

    A new head is often all zeros: its outputs are then alike, whatever the samples are.
    """
    for seed, weight in enumerate(weights):
        if tf.reduce_all(weight == 0):
            if weight.shape.rank > 1:
                draw = keras.initializers.GlorotUniform(seed=seed)
            else:
                draw = keras.initializers.RandomUniform(0.1, 0.5, seed=seed)
            weight.assign(tf.cast(draw(weight.shape, "float32"), weight.dtype))


def names_of_model(model: keras.Layer) -> list[str]:
    """A name for each of `model.variables`, in their order: its layers' names, outermost first.

    A layer that Keras named (its class and perhaps a number) is numbered anew among its
    neighbours; a name that a person gave stays. Functional and sequential models do not appear, so
    a network has the same names alone and inside another. Layers of one given name share names.
    """
    names: dict[int, str] = {}

    def visit(layer: keras.Layer, prefix: str, counts: Counter) -> None:
        if not is_frame(layer):
            prefix += _renumbered(layer, counts) + "/"
            counts = Counter()
        children = layer._flatten_layers(include_self=False, recursive=False)
        below: set[int] = set()
        for child in children:
            below.update(id(variable) for variable in child.variables)
        counts_of_variables: Counter = Counter()
        for variable in layer.variables:
            if id(variable) not in below:
                name = prefix + _renumbered(variable, counts_of_variables)
                names.setdefault(id(variable), name)
        for child in children:
            if child.variables:  # one more activation must not change the other names
                visit(child, prefix, counts)

    visit(model, "", Counter())
    return [names[id(v)] for v in model.variables]


def is_frame(layer: keras.Layer) -> bool:
    """Whether it is a functional or sequential model, which only calls other layers."""
    # A functional model knows its operations.
    is_functional = isinstance(layer, keras.Model) and hasattr(layer, "operations")
    return is_functional or isinstance(layer, keras.Sequential)


def _names_of_optimizer(
    optimizer: keras.optimizers.Optimizer, names: dict[int, str]
) -> list[str]:
    """A name for each of `optimizer.variables`: adam/iteration, adam/dense/kernel/momentum."""
    prefix = _renumbered(optimizer, Counter())
    owners: dict[str, list[str]] = {}
    for variable in optimizer._trainable_variables:
        start_of_slot = variable.path.replace("/", "_")
        owners.setdefault(start_of_slot, []).append(names[id(variable)])
    seen: Counter = Counter()
    return [f"{prefix}/{_slot(v.name, owners, seen)}" for v in optimizer.variables]


def _renumbered(named: keras.Layer | keras.Variable, counts: Counter) -> str:
    # Base classes too: `synchronize` changes a layer's class and leaves its name.
    for kind in type(named).__mro__:
        base = to_snake_case(kind.__name__)
        # keras.layers.Bidirectional names its two copies after the layer that it is given.
        match = re.fullmatch(
            rf"((?:forward_|backward_)?{re.escape(base)})(_\d+)?", named.name
        )
        if match:
            number = counts[match[1]]
            counts[match[1]] += 1
            return f"{match[1]}_{number}" if number else match[1]
    return named.name


def _slot(name: str, owners: Mapping[str, list[str]], seen: Counter) -> str:
    """dense_5_kernel_momentum: the longest beginning that is a variable's path says whose it is.

    Paths may repeat; then slots come in the order of their variables.
    """
    head = name
    while "_" in head:
        head = head.rpartition("_")[0]
        if head in owners:
            owner = owners[head][seen[name] % len(owners[head])]
            seen[name] += 1
            return f"{owner}/{name[len(head) + 1 :]}"
    # Nadam's product of momenta has no name but Keras's count of such variables in this process.
    return re.sub(r"^variable_\d+$", "variable", name)
