"""The project's task: what it promises, on real ranks. Run by `make test`, in a minute or two."""

from hvdkit import testing

# Smaller steps than configs/default.cfg has: a test shows the promise, not the speed.
FLAGS = ("--global_batch_size=8",)


def test_weights_are_the_same_on_one_and_two_ranks():
    testing.assert_same_weights(*FLAGS, ranks=(1, 2))


def test_it_learns_one_batch():
    testing.assert_learns_one_batch(*FLAGS)
