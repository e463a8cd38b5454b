/**
 * A GPU that computes nothing, for tests of faults: the driver, NVRTC, cuBLASLt and NCCL as one library. Memory is host memory,
 * each stream is a thread, events and captured graphs work, kernels and products end at once without a result. NCCL's
 * exchanges are real: processes use shared memory, and an operation waits on its stream, as NCCL's kernels do, for ranks that
 * may never arrive.
 *
 * It imitates the ways in which the real libraries block their caller while such a kernel waits:
 *   IDLE_GPU_IMPLICIT=1  allocating and freeing memory and loading code wait for the whole GPU
 *   IDLE_GPU_QUEUE=n     a launch waits if n are queued on its stream (default 1024)
 *   IDLE_GPU_CONNECT=1   the first all-gather connects on the calling thread: it waits there for the other ranks
 *   IDLE_GPU_REPORTS=1   a rank that is gone becomes an asynchronous error, as over sockets; otherwise nothing is reported, as over NVLink
 *   IDLE_GPU_FAULT=f:n:w the n-th call of the function f ends the process (w: KILL), stops it (STOP), or returns status w
 * exit() waits for the GPU too; _exit() does not.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

using Work = std::function<void()>;
using Address = uint64_t;

static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

/** Status for this call of `name`: 0, or that of IDLE_GPU_FAULT, which may also end the process. */
static int fault(const char* name) {
  static const char* const text = getenv("IDLE_GPU_FAULT");
  static std::atomic<int> calls{0};
  if (!text || strncmp(text, name, strlen(name)) != 0 || text[strlen(name)] != ':') return 0;
  char what[16] = "";
  int number = 0;
  sscanf(text + strlen(name), ":%d:%15s", &number, what);
  if (++calls != number) return 0;
  if (!strcmp(what, "KILL")) raise(SIGKILL);
  else if (!strcmp(what, "STOP")) raise(SIGSTOP);
  else return atoi(what);
  return 0;
}

struct Event {
  std::atomic<long> asked{0}, reached{0};
};

// Never destroyed: threads of streams wait for them until the process exits.
static std::mutex& lock = *new std::mutex;
static std::condition_variable& changed = *new std::condition_variable;

struct Stream {
  std::deque<Work> queue;
  bool busy = false;
  Stream() { std::thread([this] { run(); }).detach(); }
  bool idle() const { return queue.empty() && !busy; }
  void run() {
    std::unique_lock<std::mutex> held(lock);
    for (;;) {
      changed.wait(held, [this] { return !queue.empty(); });
      Work work = std::move(queue.front());
      queue.pop_front();
      busy = true;
      held.unlock();
      work();
      held.lock();
      busy = false;
      changed.notify_all();
    }
  }
};

struct Graph {
  std::vector<Work> works;
};

static std::vector<Stream*>& streams = *new std::vector<Stream*>;
static Graph* capturing = nullptr;
static std::set<Stream*> captured;
static std::set<Event*> captured_events;

static Stream* stream_of(void* handle) {
  static Stream* usual = nullptr;
  if (handle) return static_cast<Stream*>(handle);
  if (!usual) streams.push_back(usual = new Stream);
  return usual;
}

static void enqueue(void* handle, Work work) {
  static const size_t most = setting("IDLE_GPU_QUEUE", 1024);
  std::unique_lock<std::mutex> held(lock);
  Stream* stream = stream_of(handle);
  if (capturing && captured.count(stream)) {
    capturing->works.push_back(std::move(work));
    return;
  }
  changed.wait(held, [&] { return stream->queue.size() < most; });
  stream->queue.push_back(std::move(work));
  changed.notify_all();
}

static void wait_for_everything() {
  std::unique_lock<std::mutex> held(lock);
  changed.wait(held, [] {
    for (Stream* stream : streams)
      if (!stream->idle()) return false;
    return true;
  });
}

static void implicit_wait() {
  static const bool is_on = setting("IDLE_GPU_IMPLICIT", 0) != 0;
  if (is_on && !capturing) wait_for_everything();
}

__attribute__((destructor)) static void leave() { wait_for_everything(); }

static Address take(size_t bytes) { return reinterpret_cast<Address>(calloc(1, bytes + 256)); }
static void* at(Address address) { return reinterpret_cast<void*>(address); }
template <class T> static void give(void* out, T value) { memcpy(out, &value, sizeof value); }

extern "C" {
// The driver.
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* out) { return *out = 12080, 0; }
int cuDeviceGetCount(int* out) { return *out = 1, 0; }
int cuDeviceGet(int* out, int) { return *out = 0, 0; }
int cuDeviceGetName(char* out, int bytes, int) { return snprintf(out, bytes, "idle GPU"), 0; }
int cuDeviceGetAttribute(int* out, int attribute, int) {
  *out = attribute == 16 ? 4 : attribute == 75 ? setting("IDLE_GPU_ARCHITECTURE", 80) / 10 : attribute == 76 ? 0 : 166912;
  return 0;
}
int cuDeviceTotalMem_v2(size_t* out, int) {
  const char* gib = getenv("IDLE_GPU_GIB");
  return *out = (gib ? strtoull(gib, nullptr, 10) : 8ull) << 30, 0;
}
int cuDeviceGetUuid_v2(char* out, int) { return memcpy(out, "0123456789abcdef", 16), 0; }
int cuDevicePrimaryCtxRetain(void** out, int) { return *out = &lock, 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuMemGetInfo_v2(size_t* available, size_t* total) { return *available = *total = 8ull << 30, 0; }
int cuMemAlloc_v2(Address* out, size_t bytes) { return implicit_wait(), *out = take(bytes), 0; }
int cuMemFree_v2(Address address) { return implicit_wait(), free(at(address)), 0; }
int cuMemAllocHost_v2(void** out, size_t bytes) { return implicit_wait(), *out = at(take(bytes)), 0; }
int cuMemFreeHost(void* address) { return implicit_wait(), free(address), 0; }
int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
  auto copy = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
  return enqueue(stream, [=] { memcpy(at(to), copy->data(), bytes); }), 0;
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
  return enqueue(stream, [=] { memcpy(to, at(from), bytes); }), 0;
}
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
  return enqueue(stream, [=] { memmove(at(to), at(from), bytes); }), 0;
}
int cuMemsetD8Async(Address to, uint8_t value, size_t bytes, void* stream) {
  return enqueue(stream, [=] { memset(at(to), value, bytes); }), 0;
}
int cuMemsetD32Async(Address to, unsigned value, size_t count, void* stream) {
  return enqueue(stream, [=] { for (size_t i = 0; i < count; i++) static_cast<unsigned*>(at(to))[i] = value; }), 0;
}
int cuStreamCreate(void** out, unsigned) {
  std::lock_guard<std::mutex> held(lock);
  Stream* stream = new Stream;
  streams.push_back(stream);
  return *out = stream, 0;
}
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void* handle) {
  std::unique_lock<std::mutex> held(lock);
  Stream* stream = stream_of(handle);
  changed.wait(held, [&] { return stream->idle(); });
  return 0;
}
int cuStreamQuery(void* handle) {
  std::lock_guard<std::mutex> held(lock);
  return stream_of(handle)->idle() ? 0 : 600;
}
int cuEventCreate(void** out, unsigned) { return *out = new Event, 0; }
int cuEventDestroy_v2(void*) { return 0; }
int cuEventRecord(void* handle, void* stream) {
  Event* event = static_cast<Event*>(handle);
  {
    std::lock_guard<std::mutex> held(lock);
    if (capturing && captured.count(stream_of(stream))) {
      captured_events.insert(event); // a graph keeps its own order
      return 0;
    }
  }
  long number = ++event->asked;
  enqueue(stream, [=] { event->reached = number; });
  return 0;
}
int cuStreamWaitEvent(void* handle, void* waited, unsigned) {
  Event* event = static_cast<Event*>(waited);
  {
    std::lock_guard<std::mutex> held(lock);
    if (capturing && captured_events.count(event)) {
      captured.insert(stream_of(handle));
      return 0;
    }
  }
  long number = event->asked;
  enqueue(handle, [=] { while (event->reached < number) usleep(50); });
  return 0;
}
int cuEventSynchronize(void* handle) {
  Event* event = static_cast<Event*>(handle);
  while (event->reached < event->asked) usleep(50);
  return 0;
}
int cuEventElapsedTime(float* out, void*, void*) { return *out = 0.5f, 0; }
int cuStreamBeginCapture_v2(void* stream, int) {
  std::lock_guard<std::mutex> held(lock);
  capturing = new Graph;
  captured = {stream_of(stream)};
  captured_events.clear();
  return 0;
}
int cuStreamEndCapture(void*, void** out) {
  std::lock_guard<std::mutex> held(lock);
  *out = capturing;
  capturing = nullptr;
  return 0;
}
int cuGraphInstantiateWithFlags(void** out, void* graph, uint64_t) { return *out = graph, 0; }
int cuGraphLaunch(void* handle, void* stream) {
  int status = fault("cuGraphLaunch"); // a launch may return an error and have started nevertheless
  Graph* graph = static_cast<Graph*>(handle);
  return enqueue(stream, [=] { for (const Work& work : graph->works) work(); }), status;
}
int cuGraphExecDestroy(void*) { return 0; }
int cuGraphDestroy(void*) { return 0; }
int cuModuleLoadData(void** out, const void*) { return implicit_wait(), *out = &lock, 0; }
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** out, void*, const char*) { return *out = &lock, 0; }
int cuModuleGetGlobal_v2(Address* out, size_t* bytes, void*, const char*) {
  static int number = 64; // any constant of a kernel: nothing is computed with it
  return *out = reinterpret_cast<Address>(&number), *bytes = sizeof number, 0;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream, void*, void*) {
  return enqueue(stream, [] {}), 0;
}
int cuLaunchKernelEx(void*, void*, void*, void*) { return 801; } // not on this architecture
int cuGetErrorName(int, const char** out) { return *out = "IDLE_GPU", 0; }
int cuGetErrorString(int, const char** out) { return *out = "an error of the idle GPU", 0; }

// NVRTC.
int nvrtcVersion(int* major, int* minor) { return *major = 99, *minor = 0, 0; }
int nvrtcCreateProgram(void** out, const char*, const char*, int, void*, void*) { return *out = &lock, 0; }
int nvrtcCompileProgram(void*, int, void*) { return 0; }
int nvrtcGetCUBINSize(void*, size_t* out) { return *out = 16, 0; }
int nvrtcGetCUBIN(void*, char* out) { return memcpy(out, "an idle kernel..", 16), 0; }
int nvrtcGetProgramLogSize(void*, size_t* out) { return *out = 1, 0; }
int nvrtcGetProgramLog(void*, char* out) { return *out = 0; }
int nvrtcDestroyProgram(void**) { return 0; }
const char* nvrtcGetErrorString(int) { return "an error of the idle compiler"; }

// cuBLASLt.
size_t cublasLtGetVersion() { return 130000; }
int cublasLtCreate(void** out) { return *out = &lock, 0; }
int cublasLtDestroy(void*) { return 0; }
int cublasLtMatmulDescCreate(void** out, int, int) { return *out = &lock, 0; }
int cublasLtMatmulDescSetAttribute(void*, int, void*, size_t) { return 0; }
int cublasLtMatrixLayoutCreate(void** out, int, uint64_t, uint64_t, int64_t) { return *out = &lock, 0; }
int cublasLtMatrixLayoutSetAttribute(void*, int, void*, size_t) { return 0; }
int cublasLtMatmulPreferenceCreate(void** out) { return *out = &lock, 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int, void*, size_t) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* answers, int* found) {
  return memset(answers, 0, 96), *found = 1, 0;
}
int cublasLtMatmul(void*, void*, void*, Address, void*, Address, void*, void*, Address, void*, Address, void*, void*,
                   Address, size_t, void* stream) {
  return enqueue(stream, [] {}), 0;
}
}

// NCCL: ranks map a common file in IDLE_GPU_FOLDER; its name is the id.
static const int MAX_RANKS = 8;
static const size_t ROOM = 16 << 20;

struct Shared {
  std::atomic<int> pid[MAX_RANKS];
  std::atomic<long> brought[MAX_RANKS], taken[MAX_RANKS], closing[MAX_RANKS], connecting[MAX_RANKS];
};

struct Communicator {
  Shared* shared;
  char* room;
  int rank, world;
  long operations = 0;
  std::atomic<bool> aborted{false};
  bool connected = false;
};

struct Id {
  char name[128];
};

/** Waits until the word of every rank has reached `number`. */
static bool all_at(Communicator* of, std::atomic<long>* words, long number) {
  for (;;) {
    bool all = true;
    for (int rank = 0; rank < of->world; rank++) all = all && words[rank] >= number;
    if (all) return true;
    if (of->aborted) return false;
    usleep(100);
  }
}

template <class T> static void reduce_as(T* into, const T* from, size_t count, int how) {
  for (size_t i = 0; i < count; i++)
    into[i] = how == 0 ? into[i] + from[i] : how == 2 ? (into[i] > from[i] ? into[i] : from[i])
                                                      : (into[i] < from[i] ? into[i] : from[i]);
}

static size_t size_of(int type) { return type == 1 ? 1 : type == 8 ? 8 : type == 9 ? 2 : 4; }

/** bf16 is added as integers: all values are zero. */
static void reduce(void* into, const void* from, size_t count, int type, int how) {
  if (type == 8) reduce_as(static_cast<double*>(into), static_cast<const double*>(from), count, how);
  else if (type == 7) reduce_as(static_cast<float*>(into), static_cast<const float*>(from), count, how);
  else if (type == 2) reduce_as(static_cast<int*>(into), static_cast<const int*>(from), count, how);
  else if (type == 9) reduce_as(static_cast<uint16_t*>(into), static_cast<const uint16_t*>(from), count, how);
  else reduce_as(static_cast<uint8_t*>(into), static_cast<const uint8_t*>(from), count, how);
}

/** Writes `bytes` of this rank, waits for all ranks, calls `use` to read them, and waits until all have read them. */
static void exchange(Communicator* of, const void* own, size_t bytes, const std::function<void(char* const*)>& use) {
  if (bytes > ROOM) {
    fprintf(stderr, "idle GPU: %zu bytes do not fit\n", bytes);
    abort();
  }
  long number = ++of->operations;
  if (!all_at(of, of->shared->taken, number - 1)) return;
  memcpy(of->room + of->rank * ROOM, own, bytes);
  of->shared->brought[of->rank] = number;
  if (!all_at(of, of->shared->brought, number)) return;
  char* parts[MAX_RANKS];
  for (int rank = 0; rank < of->world; rank++) parts[rank] = of->room + rank * ROOM;
  use(parts);
  of->shared->taken[of->rank] = number;
}

extern "C" {
int ncclGetVersion(int* out) { return *out = 29900, 0; }
const char* ncclGetErrorString(int status) { return status == 6 ? "remote process exited or there was a network error" : "an error of the idle NCCL"; }
const char* ncclGetLastError(void*) { return ""; }
int ncclGetUniqueId(Id* out) {
  memset(out, 0, sizeof *out);
  const char* folder = getenv("IDLE_GPU_FOLDER");
  snprintf(out->name, sizeof out->name, "%s/trefoil-idle-gpu-%d", folder ? folder : "/tmp", getpid());
  return 0;
}
int ncclCommInitRank(Communicator** out, int world, Id id, int rank) {
  if (rank < 0 || rank >= world || world > MAX_RANKS) return 4;
  if (int status = fault("ncclCommInitRank")) return status;
  size_t bytes = 4096 + MAX_RANKS * ROOM;
  int file = open(id.name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, bytes) != 0) return 2;
  char* memory = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
  if (memory == MAP_FAILED) return 2;
  auto* of = new Communicator{reinterpret_cast<Shared*>(memory), memory + 4096, rank, world};
  of->shared->pid[rank] = getpid();
  of->shared->connecting[rank] = 1;
  all_at(of, of->shared->connecting, 1);
  if (rank == 0) unlink(id.name); // all ranks have opened it
  return *out = of, 0;
}
int ncclCommGetAsyncError(Communicator* of, int* out) {
  static const bool reports = setting("IDLE_GPU_REPORTS", 0) != 0;
  *out = 0;
  for (int rank = 0; reports && rank < of->world; rank++)
    if (kill(of->shared->pid[rank], 0) != 0) *out = 6;
  return 0;
}
int ncclCommAbort(Communicator* of) { return of->aborted = true, wait_for_everything(), 0; }
int ncclCommFinalize(Communicator* of) {
  fault("ncclCommFinalize");
  return of->shared->closing[of->rank] = 1, all_at(of, of->shared->closing, 1), 0;
}
int ncclCommDestroy(Communicator*) { return 0; }
int ncclGroupStart() { return 0; }
int ncclGroupEnd() { return 0; }
int ncclAllReduce(Address from, Address into, size_t count, int type, int how, Communicator* of, void* stream) {
  if (int status = fault("ncclAllReduce")) return status;
  enqueue(stream, [=] {
    exchange(of, at(from), count * size_of(type), [=](char* const* parts) {
      std::string sum(parts[0], count * size_of(type));
      for (int rank = 1; rank < of->world; rank++) reduce(&sum[0], parts[rank], count, type, how);
      memcpy(at(into), sum.data(), sum.size());
    });
  });
  return 0;
}
int ncclReduceScatter(Address from, Address into, size_t count, int type, int how, Communicator* of, void* stream) {
  if (int status = fault("ncclReduceScatter")) return status;
  enqueue(stream, [=] {
    size_t part = count * size_of(type);
    exchange(of, at(from), part * of->world, [=](char* const* parts) {
      std::string sum(parts[0] + of->rank * part, part);
      for (int rank = 1; rank < of->world; rank++) reduce(&sum[0], parts[rank] + of->rank * part, count, type, how);
      memcpy(at(into), sum.data(), part);
    });
  });
  return 0;
}
int ncclAllGather(Address from, Address into, size_t count, int type, Communicator* of, void* stream) {
  if (int status = fault("ncclAllGather")) return status;
  static const bool connects = setting("IDLE_GPU_CONNECT", 0) != 0;
  if (connects && !of->connected) {
    of->shared->connecting[of->rank] = 2;
    all_at(of, of->shared->connecting, 2);
    of->connected = true;
  }
  enqueue(stream, [=] {
    size_t part = count * size_of(type);
    exchange(of, at(from), part, [=](char* const* parts) {
      for (int rank = 0; rank < of->world; rank++) memcpy(static_cast<char*>(at(into)) + rank * part, parts[rank], part);
    });
  });
  return 0;
}
int ncclBroadcast(Address from, Address into, size_t count, int type, int root, Communicator* of, void* stream) {
  enqueue(stream, [=] {
    size_t bytes = count * size_of(type);
    exchange(of, at(from), bytes, [=](char* const* parts) { memcpy(at(into), parts[root], bytes); });
  });
  return 0;
}
}
