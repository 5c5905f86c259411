/* Stands in for libcudart and libcuda: one H100 that accepts every call and does nothing. It has memory for the one
   tensor that FakeTensorMode makes to initialise a device: a second real one gets an error. */
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY (80ul << 30)

int stub_success(void) { return 0; }
/* Without prototypes: only the returned 0 counts. */
#define SUCCEEDS(name) __asm__(".globl " #name "\n.set " #name ", stub_success");
#define EACH(X) X(cudaSetDevice) X(cudaDeviceSynchronize) X(cudaGetLastError) X(cudaPeekAtLastError) \
  X(cudaStreamSynchronize) X(cudaStreamQuery) X(cudaStreamWaitEvent) X(cudaStreamDestroy) X(cudaEventRecord) \
  X(cudaEventRecordWithFlags) X(cudaEventSynchronize) X(cudaEventQuery) X(cudaEventDestroy) X(cudaHostRegister) \
  X(cudaHostUnregister) X(cudaThreadExchangeStreamCaptureMode) X(cudaDeviceEnablePeerAccess) X(cudaFuncSetAttribute) \
  X(cudaMemPoolSetAttribute) X(cudaMemPoolTrimTo) X(cudaProfilerStart) X(cudaProfilerStop) X(cuInit)
EACH(SUCCEEDS)

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { *left = *all = MEMORY; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) { *ms = 1; return cudaSuccess; }
cudaError_t cudaFreeHost(void *memory) { free(memory); return cudaSuccess; }

static void *handle(void) { static size_t next = 256; return (void *)(next += 16); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { *event = handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = handle();
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
static void *held;
cudaError_t cudaMalloc(void **memory, size_t size) {
  if (held) return cudaErrorMemoryAllocation;
  *memory = held = malloc(size);
  return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
  if (memory && memory == held) {
    free(held);
    held = NULL;
  }
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) {
  return (*memory = malloc(size)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes); /* ordinary host memory */
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "no GPU: symbolic H100");
  found->major = 9;
  found->multiProcessorCount = 132;
  found->totalGlobalMem = MEMORY;
  found->warpSize = 32;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxThreadsPerBlock = 1024;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = 50 << 20;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = (void *)stub_success;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  *active = 1;
  return 0;
}
int cuDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "symbolic"; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
