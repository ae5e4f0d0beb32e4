"""horovodrun --gloo, without its seconds of importing TensorFlow: hosts.sh starts it.

horovodrun imports TensorFlow in a process of its own only to see whether Horovod has Gloo. It takes
no Horovod built here to be without, and where one is, the ranks say so themselves.
"""

import argparse
import sys
import types

from horovod.runner import launch
from horovod.runner.driver import driver_service
from horovod.runner.util import remote

# A host that is cut off is a lost one after half a minute, as for Gloo; else ssh waits for ever.
_KEEPALIVE = " -o ServerAliveInterval=10 -o ServerAliveCountMax=3 -o ConnectTimeout=30"


class Whole(argparse.ArgumentParser):
    """Takes whole options only: --timeline of train.py is no --timeline-filename cut short."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options, allow_abbrev=False)


def let_hosts_come_and_go() -> None:
    """Settings of an elastic run that horovodrun has no flags for."""
    remote.SSH_COMMAND_PREFIX += _KEEPALIVE
    # Where the first hosts are all this one, others may come that reach it by --interface only.
    driver_service.get_local_interfaces = lambda settings: set(settings.nics)


if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    launch.argparse = types.SimpleNamespace(**vars(argparse) | {"ArgumentParser": Whole})
    sys.argv[0] = "horovodrun"
    if "--host-discovery-script" in sys.argv:
        let_hosts_come_and_go()
    launch.run_commandline()
