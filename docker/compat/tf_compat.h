// Forced into every file of Horovod's build (-include). TensorFlow 2.21 no longer exports
// stream_executor::gpu::AsGpuStreamValue, which Horovod 0.28.1 declares and calls; inline, it
// is the stream's own handle. Only a CUDA build against 2.21 or later sees anything here.
#ifndef COMPAT_TF_COMPAT_H_
#define COMPAT_TF_COMPAT_H_

// Horovod's common.h throws std::logic_error; from g++ 13 on no other header brings it.
#ifdef __cplusplus
#include <stdexcept>
#endif

#if defined(__cplusplus) && HAVE_CUDA && TENSORFLOW_VERSION >= 2021000000
#include <cuda_runtime.h>

#include "xla/stream_executor/stream.h"

namespace stream_executor {
namespace gpu {
inline cudaStream_t AsGpuStreamValue(Stream* stream) {
  return static_cast<cudaStream_t>(stream->platform_specific_handle().stream);
}
}  // namespace gpu
}  // namespace stream_executor
#endif

#endif  // COMPAT_TF_COMPAT_H_
