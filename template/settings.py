"""What this project adds to the settings of a run: a field of `Settings` is a flag.

It has help and limits, is read from flagfiles and written to RUN_DIR/config.cfg like every other.
The task finds it in its config: `self.config.my_field`. To change a default of hvdkit's, declare
the field again: `num_steps: int = hvdkit.setting(5000, "steps of the run", low=1)`.
"""

import hvdkit


class Settings(hvdkit.Settings):
    """Settings of this project"""

    # my_field: float = hvdkit.setting(0.1, "what it is", low=0, below=1)  # 0 <= it < 1
    #
    # def check(self) -> None:
    #     super().check()
    #     if self.my_field and self.optimizer == "sgd":
    #         raise ValueError(f"--my_field={self.my_field} is for Adam: use --optimizer=adam")
