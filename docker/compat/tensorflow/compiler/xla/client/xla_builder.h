// Where Horovod 0.28.1 looks for the XLA builder. TensorFlow 2.19 moved it out of
// tensorflow/compiler/xla and dropped xla::StatusOr, which xla_mpi_ops.cc still names.
#ifndef COMPAT_TENSORFLOW_COMPILER_XLA_CLIENT_XLA_BUILDER_H_
#define COMPAT_TENSORFLOW_COMPILER_XLA_CLIENT_XLA_BUILDER_H_

#include "absl/status/statusor.h"
#include "xla/hlo/builder/xla_builder.h"

namespace xla {
template <typename T>
using StatusOr = absl::StatusOr<T>;
}  // namespace xla

#endif  // COMPAT_TENSORFLOW_COMPILER_XLA_CLIENT_XLA_BUILDER_H_
