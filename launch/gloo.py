"""horovodrun --gloo, without its seconds of importing TensorFlow: hosts.sh starts it.

horovodrun imports TensorFlow in a process of its own only to see whether Horovod has Gloo. It takes
no Horovod built here to be without, and where one is, the ranks say so themselves.
"""

import sys

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    sys.argv[0] = "horovodrun"
    launch.run_commandline()
