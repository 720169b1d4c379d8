/* A CUDA runtime with one GPU, an H100 that computes nothing: what torch asks for before it gives a kernel to a device.
   benchmarks/fake_cuda.py puts it in front of NVIDIA's. What is not here reaches NVIDIA's, which finds no driver. */

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

#define WORKED(call)                                                                                                   \
    cudaError_t CUDARTAPI call { return cudaSuccess; }
#define GIVES(call, out, value)                                                                                        \
    cudaError_t CUDARTAPI call { *out = value; return cudaSuccess; }
#pragma GCC diagnostic ignored "-Wunused-parameter"

static const size_t MEMORY = 80ul << 30;

static void *handle(void) {
    static char *last = 0;
    return last += 4096;
}

GIVES(cudaGetDeviceCount(int *count), count, 1)
GIVES(cudaGetDevice(int *device), device, 0)
GIVES(cudaDriverGetVersion(int *version), version, CUDART_VERSION)
WORKED(cudaSetDevice(int device))
WORKED(cudaDeviceSynchronize(void))
WORKED(cudaGetLastError(void))
WORKED(cudaPeekAtLastError(void))

cudaError_t CUDARTAPI cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "NVIDIA H100 without a device");
    found->major = 9;
    found->totalGlobalMem = MEMORY;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = 227 << 10;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaMemGetInfo(size_t *unused, size_t *total) {
    *unused = *total = MEMORY;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int *least, int *most) {
    *least = 0;
    *most = -5;
    return cudaSuccess;
}

GIVES(cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority), stream, handle())
GIVES(cudaStreamGetPriority(cudaStream_t stream, int *priority), priority, 0)
GIVES(cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status), status, 0)
GIVES(cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                               cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                               size_t *count),
      status, 0)
WORKED(cudaStreamQuery(cudaStream_t stream))
WORKED(cudaStreamSynchronize(cudaStream_t stream))
WORKED(cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags))

GIVES(cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags), event, handle())
WORKED(cudaEventDestroy(cudaEvent_t event))
WORKED(cudaEventQuery(cudaEvent_t event))
WORKED(cudaEventRecord(cudaEvent_t event, cudaStream_t stream))
WORKED(cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags))
WORKED(cudaEventSynchronize(cudaEvent_t event))

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
