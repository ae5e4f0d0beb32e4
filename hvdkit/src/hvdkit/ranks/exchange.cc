// HorovodOrderedAllreduce: the sum of a small tensor over ranks, where the graph fixes the order of
// all calls, so that ranks need not negotiate what comes next.
//
// On one host ranks write into memory that they share; between hosts MPI carries the numbers. Each
// call says what it exchanges, so that ranks which differ are found. exchange.py opens it.
#include <fcntl.h>
#include <mpi.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {
using tensorflow::Tensor;
constexpr int64_t kMostNumbers = 32 << 10;  // of one tensor; exchange.py knows it too
constexpr char kRule[] = ": all ranks must call the same layers in the same order";
constexpr double kYields = 0.002;     // seconds in which a waiting rank keeps asking
constexpr double kLongestNap = 1e-3;  // seconds

// What a rank gives to one call. Two are used in turn: a rank that writes for call n + 2 has seen
// that all began call n + 1, and thus have read what it gave to call n.
struct Part {
  std::atomic<uint64_t> call;  // the number of the call, once everything else is written
  char text[248];
  double numbers[kMostNumbers];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share it");

// What MPI reads and writes until a call is done, or for ever where ranks do not come.
struct MpiCall {
  Tensor own;
  Tensor sum;
  int64_t digests[2];
  int64_t largest[2];
  MPI_Request request;
};

std::mutex one_call;    // free, as calls are in order, unless somebody's threads are not
Part* parts = nullptr;  // [2][size]
int file = -1;          // each rank holds a lock of one byte of it, which ends with its process
MPI_Comm ranks = MPI_COMM_NULL;
int rank = 0, size = 1;
int limit = 0;  // seconds to wait; 0: for ever
uint64_t calls = 0;

bool HasEnded(int other) {
  struct flock byte = {};
  byte.l_type = F_WRLCK;
  byte.l_whence = SEEK_SET;
  byte.l_start = other;
  byte.l_len = 1;
  return other != rank && fcntl(file, F_GETLK, &byte) == 0 && byte.l_type == F_UNLCK;
}

// Waits until `done()`; false where `lost()`, or where the limit has passed. Between two looks at
// most a second counts: a run that was suspended goes on when it wakes.
template <typename Done, typename Lost>
bool Wait(Done done, Lost lost) {
  auto last = std::chrono::steady_clock::now();
  double waited = 0;
  while (!done()) {
    const auto now = std::chrono::steady_clock::now();
    waited += std::min(1.0, std::chrono::duration<double>(now - last).count());
    last = now;
    if (waited < kYields) {
      sched_yield();
      continue;
    }
    // A rank may have given its part and ended since the last look.
    if (lost() || (limit > 0 && waited > limit)) return done();
    usleep(1e6 * std::min(kLongestNap, waited / 8));
  }
  return true;
}

absl::Status SumInMemory(const std::string& text, const Tensor& own, Tensor* sum) {
  const int64_t count = own.NumElements();
  double* total = sum->flat<double>().data();
  const uint64_t call = ++calls;
  Part* everyone = parts + (call % 2) * size;
  std::strcpy(everyone[rank].text, text.c_str());
  std::memcpy(everyone[rank].numbers, own.flat<double>().data(), count * sizeof(double));
  everyone[rank].call.store(call, std::memory_order_release);
  // In the order of ranks, so that all have the same bits.
  for (int other = 0; other < size; ++other) {
    const Part& part = everyone[other];
    bool ended = false;
    const auto has_come = [&] { return part.call.load(std::memory_order_acquire) == call; };
    if (!Wait(has_come, [&] { return ended = HasEnded(other); })) {
      const auto how = ended ? " has ended" : absl::StrCat(" did not come within ", limit, " s");
      return absl::AbortedError(absl::StrCat("rank ", other, how, " while rank ", rank,
                                             " waited in exchange ", call, " (", text, ")"));
    }
    if (text != part.text) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", other, " exchanges ", part.text, " where rank ", rank,
                       " exchanges ", text, kRule));
    }
    for (int64_t i = 0; i < count; ++i) {
      total[i] = other == 0 ? part.numbers[i] : total[i] + part.numbers[i];
    }
  }
  return absl::OkStatus();
}

// MPI ends the whole run at an error of its own.
absl::Status SumOverMpi(const std::string& text, const Tensor& own, Tensor* sum) {
  uint64_t digest = ++calls;  // FNV-1a
  for (const unsigned char byte : text) digest = (digest ^ byte) * 1099511628211u;
  const int64_t positive = digest >> 1;
  MpiCall* call = new MpiCall{own, *sum, {positive, -positive}};
  const auto done = [call] {
    int is_done = 0;
    MPI_Test(&call->request, &is_done, MPI_STATUS_IGNORE);
    return is_done != 0;
  };
  const auto never = [] { return false; };
  MPI_Iallreduce(call->digests, call->largest, 2, MPI_INT64_T, MPI_MAX, ranks, &call->request);
  bool all_came = Wait(done, never);
  // The largest digest, and the smallest. MPI must not get tensors of different sizes.
  const bool are_alike = all_came && call->largest[0] == -call->largest[1];
  if (are_alike) {
    MPI_Iallreduce(own.flat<double>().data(), sum->flat<double>().data(), own.NumElements(),
                   MPI_DOUBLE, MPI_SUM, ranks, &call->request);
    all_came = Wait(done, never);
  }
  if (!all_came) {
    return absl::AbortedError(absl::StrCat("a rank did not come within ", limit, " s while rank ",
                                           rank, " waited in exchange ", calls, " (", text, ")"));
  }
  delete call;
  if (are_alike) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("ranks exchange different tensors, where rank ",
                                                 rank, " exchanges ", text, kRule));
}

class OrderedAllreduce : public tensorflow::OpKernel {
 public:
  explicit OrderedAllreduce(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("tensor_name", &name_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const Tensor& own = context->input(1);
    Tensor* sum = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, own.shape(), &sum));
    std::string text = absl::StrCat(own.NumElements(), " numbers of ", name_);
    text.resize(std::min(text.size(), sizeof(Part::text) - 1));
    const std::lock_guard<std::mutex> lock(one_call);
    OP_REQUIRES(context, (parts || ranks != MPI_COMM_NULL) && own.NumElements() <= kMostNumbers,
                absl::FailedPreconditionError("no memory is open for " + text));
    OP_REQUIRES_OK(context, parts ? SumInMemory(text, own, sum) : SumOverMpi(text, own, sum));
  }
 private:
  std::string name_;
};

REGISTER_OP("HorovodOrderedAllreduce")
    .Input("order: resource")  // calls that take the same one run in the order of the program
    .Input("x: double")
    .Output("sum: double")
    .Attr("tensor_name: string")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->input(1));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("HorovodOrderedAllreduce").Device(tensorflow::DEVICE_CPU),
                        OrderedAllreduce);

}  // namespace

extern "C" int hvdkit_exchange_bytes(int ranks_of_host) { return 2 * ranks_of_host * sizeof(Part); }

// Begins anew, with memory (an open file) or MPI (`own`, of these calls alone). Returns an errno.
extern "C" int hvdkit_exchange_open(int shared, MPI_Comm* own, int own_rank, int all, int seconds) {
  const std::lock_guard<std::mutex> lock(one_call);
  if (parts) munmap(parts, hvdkit_exchange_bytes(size));
  parts = nullptr;
  ranks = own ? *own : MPI_COMM_NULL;
  if (file >= 0) close(file);
  file = shared;
  rank = own_rank;
  size = all;
  limit = seconds;
  calls = 0;
  if (own) return 0;
  const int bytes = hvdkit_exchange_bytes(size);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return errno;
  parts = static_cast<Part*>(memory);
  return 0;
}
