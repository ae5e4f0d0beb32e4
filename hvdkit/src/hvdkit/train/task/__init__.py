"""What a task is.

protocol                Task: what a task must have; load_task, optional
checks                  mistakes of a task as one sentence before the first step
inputs                  what its model is called with outside of training
outputs                 what its model's outputs mean: softmax, one_logit, sigmoid
"""

from hvdkit.train.task.protocol import Example, Task, load_task, optional, settings_of

__all__ = ["Example", "Task", "load_task", "optional", "settings_of"]
