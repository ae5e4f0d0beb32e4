"""Two ranks add up their numbers: the proof of a build. Arguments: transport, device."""

import sys

import horovod.tensorflow as hvd
import tensorflow as tf

transport, device = sys.argv[1:]
hvd.init()
total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="setup").numpy()[0]
if (hvd.size(), total, hvd.mpi_enabled()) != (2, 3.0, transport == "mpi"):
    sys.exit(f"{hvd.size()} ranks, a sum of {total}, MPI {hvd.mpi_enabled()}: for {transport}?")
if device == "gpu" and not hvd.nccl_built():
    sys.exit("built without NCCL")
