// A stand-in for the CUDA runtime and driver, cuBLAS and NCCL, which LD_PRELOAD puts in front of the real ones. It
// computes nothing. It writes a line per launch, copy, collective, event and wait: the stream, what was called, and, as
// far as the arguments tell, what that reads (r) and writes (w): address, bytes. Of the headers only structures are
// included; handles are pointers here, sizes longs, and arguments behind the last one that is used are left out. Their
// other functions do nothing and return 0: see tests/test_standin.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <library_types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static FILE *out;  // where the one thread that trains writes
void standin_open(char *path) { out = path ? fopen(path, "w") : (fclose(out), NULL); }
#define SAY(stream, ...) \
  (out ? fprintf(out, "%lx ", (long)(stream)), fprintf(out, __VA_ARGS__), fputc('\n', out), 0 : 0)
int standin_say(void *stream, char *line) { return SAY(stream, "%s", line); }

// Memory: addresses that no process has, each given out once, as nobody reads or writes there. All others are "pinned".
static char *const DEVICE = (char *)(1l << 60);
static long used;
int cudaMalloc(void **p, long bytes) {
  *p = DEVICE + used, used += (bytes + 511) & ~511l;
  return SAY(0, "malloc");
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *a, char *p) {
  int type = p >= DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  return *a = (struct cudaPointerAttributes){.type = type, .devicePointer = p, .hostPointer = p}, 0;
}
int cuPointerGetAttribute(void **value, int attribute, void *p) { return *value = p, 0; }
int cudaMemcpyAsync(void *to, void *from, long bytes, int kind, void *stream) {
  return SAY(stream, "copy memory r %lx %lx w %lx %lx", from, bytes, to, bytes);
}
int cudaMemsetAsync(void *p, int value, long bytes, void *s) { return SAY(s, "copy zeros w %lx %lx", p, bytes); }

// The device: a Hopper GPU.
int cudaGetDeviceProperties(struct cudaDeviceProp *p) {
  *p = (struct cudaDeviceProp){.name = "NVIDIA H200", .totalGlobalMem = 141l << 30, .major = 9, .warpSize = 32,
    .multiProcessorCount = 132, .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048,
    .sharedMemPerBlockOptin = 232448, .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {1 << 30, 65535, 65535}};
  return 0;
}
#define GIVES(function, value) int function(int *p) { return *p = (value), 0; }
GIVES(cudaGetDeviceCount, 1)
GIVES(cudaGetDevice, 0)
GIVES(cuCtxGetDevice, 0)
GIVES(cudaDriverGetVersion, 13000)
GIVES(cuDeviceGetAttribute, 232448)  // what Triton asks for are upper limits, as of shared memory
// By these torch's sorts, and CUTLASS, choose how many blocks to launch.
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2)
int cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute) {
  *value = attribute == cudaDevAttrWarpSize ? 32 : attribute == cudaDevAttrMultiProcessorCount ? 132
    : attribute == cudaDevAttrMaxThreadsPerMultiProcessor ? 2048 : attribute == cudaDevAttrComputeCapabilityMajor ? 9
    : attribute == cudaDevAttrComputeCapabilityMinor ? 0 : 1024;
  return 0;
}
int cudaFuncGetAttributes(struct cudaFuncAttributes *a) {
  *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90};
  return 0;
}
int cuCtxGetCurrent(void **context) { return *context = "the context", 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
int cudaGetDriverEntryPointByVersion(char *name, void **function, unsigned version, long flags, int *found) {
  *function = dlsym(RTLD_DEFAULT, name);
  return *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound, 0;
}

// Streams and events.
int cudaStreamCreateWithPriority(void **p) { static long last = 0x1000; return *p = (void *)++last, 0; }
int cudaEventCreateWithFlags(void **p) { return cudaStreamCreateWithPriority(p); }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { return *status = 0; }
int cudaEventRecord(void *event, void *stream) { return SAY(stream, "record %lx", event); }
int cudaEventRecordWithFlags(void *event, void *stream) { return cudaEventRecord(event, stream); }
int cudaStreamWaitEvent(void *stream, void *event) { return SAY(stream, "wait %lx", event); }
int cudaStreamSynchronize(void *stream) { return SAY(stream, "sync"); }
int cudaDeviceSynchronize(void) { return SAY(0, "sync"); }
int cudaEventSynchronize(void *event) { return SAY(0, "sync"); }
int cudaEventQuery(void *event) {  // never happened for NCCL's watchdog: what that frees would differ from run to run
  return getpid() == gettid() ? SAY(0, "reached %lx", event) : cudaErrorNotReady;
}

// Kernels: torch's are launched by the runtime, Triton's by the driver.
static __thread void *pushed;
int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return pushed = stream, 0; }
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) { return *stream = pushed, 0; }
int cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
  return SAY(stream, "launch torch");
}
int __cudaLaunchKernel() __attribute__((alias("cudaLaunchKernel")));
int cuModuleGetFunction(void **function, void *module, char *name) { return *function = strdup(name), 0; }
int cuFuncGetAttribute(int *value, int attribute) { return *value = attribute ? 0 : 1024, 0; }  // 0: threads at most
typedef struct { unsigned grid[3], block[3], shared; void *stream; } LaunchConfig;  // cuda.h's, as far as it is read
int cuLaunchKernelEx(LaunchConfig *c, char *function) { return SAY(c->stream, "launch %s", function); }

// cuBLAS: a handle is a stream.
int cublasCreate_v2(void ***handle) { return *handle = calloc(1, sizeof **handle), 0; }
int cublasSetStream_v2(void **handle, void *stream) { return *handle = stream, 0; }
static long extent(int columns, int stride, int rows, int type) {  // bytes of a matrix that is stored column by column
  return ((columns - 1l) * stride + rows) * (type == CUDA_R_32F ? 4 : 2);
}
int cublasGemmEx(void **handle, int ta, int tb, int m, int n, int k, void *alpha, void *A, int at, int lda,
                 void *B, int bt, int ldb, void *beta, void *C, int ct, int ldc) {
  return SAY(*handle, "launch matmul r %lx %lx r %lx %lx w %lx %lx",
             A, ta ? extent(m, lda, k, at) : extent(k, lda, m, at),
             B, tb ? extent(k, ldb, n, bt) : extent(n, ldb, k, bt), C, extent(n, ldc, m, ct));
}

// NCCL.
typedef struct { int number, size; } Comm;
int standin_split;  // ranks of a communicator that ncclCommSplit makes
int ncclCommInitRankConfig(Comm **comm, int size) {
  static int number;
  *comm = calloc(1, 4096);  // torch reads fields of the real one
  return **comm = (Comm){number++, size}, 0;
}
int ncclCommSplit(Comm *parent, int color, int key, Comm **comm) { return ncclCommInitRankConfig(comm, standin_split); }
int ncclCommGetAsyncError(Comm *comm, int *error) { return *error = 0; }
GIVES(ncclGetVersion, 22809)
static int nccl(char *name, Comm *c, void *stream, void *from, long read, void *to, long written, int type) {
  int e = (int[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type];  // bytes of an element, for each ncclDataType_t
  return SAY(stream, "collective %s@%d r %lx %lx w %lx %lx", name, c->number, from, read * e, to, written * e);
}
int ncclAllReduce(void *a, void *b, long n, int type, int operation, Comm *c, void *s) {
  return nccl("all_reduce", c, s, a, n, b, n, type);
}
int ncclAllGather(void *a, void *b, long n, int type, Comm *c, void *s) {
  return nccl("all_gather", c, s, a, n, b, n * c->size, type);
}
int ncclReduceScatter(void *a, void *b, long n, int type, int operation, Comm *c, void *s) {
  return nccl("reduce_scatter", c, s, a, n * c->size, b, n, type);
}
int ncclSend(void *a, long n, int type, int peer, Comm *c, void *s) { return nccl("send", c, s, a, n, 0, 0, type); }
int ncclRecv(void *b, long n, int type, int peer, Comm *c, void *s) { return nccl("recv", c, s, 0, 0, b, n, type); }
