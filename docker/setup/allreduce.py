"""Two ranks add up their numbers: the proof of a build. Arguments: transport, device, report."""

import sys

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

transport, device, report = sys.argv[1:]
hvd.init()
total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="setup").numpy()[0]
if (hvd.size(), total) != (2, 3.0):
    sys.exit(f"{hvd.size()} ranks and a sum of {total}: 2 and 3.0 were expected")
if hvd.mpi_enabled() != (transport == "mpi"):
    sys.exit(f"not over {transport}")
has = {"Gloo": hvd.gloo_built(), "MPI": hvd.mpi_built()}
has |= {"NCCL": hvd.nccl_built(), "CUDA": hvd.cuda_built()}
if device == "gpu" and not has["NCCL"]:
    sys.exit("built without NCCL")
if hvd.rank() == 0:
    built = ", ".join(name for name, there in has.items() if there)
    missing = ", ".join(name for name, there in has.items() if not there) or "nothing"
    with open(report, "w") as file:
        print(
            f"Built: TensorFlow {tf.__version__}, Keras {keras.__version__};"
            f" Horovod with {built}, without {missing}",
            file=file,
        )
