"""Two ranks add up their numbers: the proof of a build. Arguments: transport, device."""

import ctypes
import sys

import horovod.tensorflow as hvd
import tensorflow as tf

transport, device = sys.argv[1:]
hvd.init()
total = hvd.allreduce(
    tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="setup"
).numpy()[0]
if (hvd.size(), total, hvd.mpi_enabled()) != (2, 3.0, transport == "mpi"):
    sys.exit(
        f"{hvd.size()} ranks, a sum of {total}, MPI {hvd.mpi_enabled()}: for {transport}?"
    )
if device == "gpu":
    if not hvd.nccl_built():
        sys.exit("built without NCCL")
    # What TensorFlow asks when it sees a GPU, and there is none here: are CUDA's libraries found?
    framework = ctypes.CDLL(f"{tf.sysconfig.get_lib()}/libtensorflow_framework.so.2")
    status = ctypes.c_void_p()
    framework["_ZN3tsl8internal9DsoLoader26MaybeTryDlopenGPULibrariesEv"](
        ctypes.byref(status)
    )
    if status.value != 1:  # absl's OK
        sys.exit(
            "TensorFlow would see no GPU: it does not find all of CUDA's libraries"
        )
