"""Groups of weights, each with an update rule and a rate of its own, as one optimizer."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdkit.logs import join
from hvdkit.ranks.world import raw


class Group(NamedTuple):
    """Some weights of the model; a task's `optimizer` returns a list of groups.

    `weights`: variables, or a function of a variable that says whether it belongs here; the first
    group that takes a weight has it. The group's rate is `rate` times that of the schedule. Its
    weight decay is the optimizer's own (weight_decay=0.01), which Keras subtracts as rate * decay *
    w from every weight of the group.
    """

    weights: Callable[[keras.Variable], bool] | Sequence[keras.Variable]
    optimizer: keras.optimizers.Optimizer
    rate: float = 1.0


class Groups(keras.optimizers.Optimizer):
    """Applies each group's optimizer to its weights.

    One whose weights get no gradient in a step (a GAN's other turn) does nothing: Adam's t stays.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__(learning_rate=1.0, name="groups")  # the run sets the rate
        for group in groups:
            if not isinstance(group, Group):
                raise ValueError(
                    f"optimizer returns a list of {group!r:.80}: make it of Groups"
                )
            if not (
                isinstance(group.rate, (int, float)) and 0 <= group.rate < math.inf
            ):
                raise ValueError(
                    f"optimizer: a Group's rate of {group.rate!r:.80} is no factor"
                )
        if not groups or len({id(group.optimizer) for group in groups}) < len(groups):
            raise ValueError(
                "optimizer: return at least one Group, each with its own optimizer"
            )
        self.groups = tuple(groups)
        self._owners: dict[int, int] = {}  # by a weight's id, the number of its group

    @property
    def variables(self) -> list[keras.Variable]:
        variables = super().variables
        for group in self.groups:
            variables = [*variables, *group.optimizer.variables]
        return variables

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Raises ValueError where a weight is in no group, or a group has none."""
        super().build(variables)
        known = {id(variable) for variable in variables}
        for number, group in enumerate(self.groups):
            belongs = group.weights
            if not callable(belongs):
                other = [v.path for v in belongs if id(v) not in known]
                if other:
                    raise ValueError(
                        f"optimizer: Group {number} has {join(other)}, not trained here"
                    )
                belongs = _membership(belongs)
            weights = [v for v in variables if id(v) not in self._owners and belongs(v)]
            if not weights:
                raise ValueError(
                    f"optimizer: Group {number} takes no weight that is left to it"
                )
            for weight in weights:
                self._owners[id(weight)] = number
            group.optimizer.build(weights)
        left = [v.path for v in variables if id(v) not in self._owners]
        if left:
            raise ValueError(
                f"optimizer: {join(left)} is in no Group: end with Group(lambda v: True, ...)"
            )

    def apply(
        self, grads: Sequence[tf.Tensor], trainable_variables: Sequence[Any]
    ) -> None:
        for number, group in enumerate(self.groups):
            group_gradients = []
            group_weights = []
            for gradient, weight in zip(grads, trainable_variables):
                if self._owners[id(weight)] == number:
                    group_gradients.append(gradient)
                    group_weights.append(weight)
            if group_weights:
                optimizer = group.optimizer
                rate = raw(self.learning_rate)
                rate = rate * tf.constant(group.rate, rate.dtype)
                optimizer.learning_rate.assign(
                    tf.cast(rate, optimizer.learning_rate.dtype)
                )
                optimizer.apply(group_gradients, group_weights)
        self._iterations.assign_add(1)


def _membership(weights: Sequence[keras.Variable]) -> Callable[[keras.Variable], bool]:
    listed = {id(weight) for weight in weights}
    return lambda variable: id(variable) in listed


def optimizers_of(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """The optimizers of the groups, or the one that there is."""
    if isinstance(optimizer, Groups):
        return [group.optimizer for group in optimizer.groups]
    return [optimizer]


def weights_of(optimizer: keras.optimizers.Optimizer) -> list[list[keras.Variable]]:
    """The weights of each of `optimizers_of`; call it once the optimizer was built."""
    weights = optimizer._trainable_variables
    if not isinstance(optimizer, Groups):
        return [weights]
    by_group: list[list[keras.Variable]] = [[] for _ in optimizer.groups]
    for weight in weights:
        by_group[optimizer._owners[id(weight)]].append(weight)
    return by_group


def weights_at_rest(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Weights of groups whose rate is 0."""
    if not isinstance(optimizer, Groups):
        return []
    resting = []
    for group, weights in zip(optimizer.groups, weights_of(optimizer)):
        if not group.rate:
            resting += weights
    return resting
