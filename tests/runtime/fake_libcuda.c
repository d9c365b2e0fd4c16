/* A CUDA driver that only writes down launches: what Triton's own C code passes, and what ours does. */

#include "cuda.h"
#include <stdint.h>
#include <string.h>

/* Set by the test: how many parameters the kernel has, and their sizes in bytes. */
int parameter_count = 0;
uint32_t parameter_sizes[256];

/* Of the last launch: its configuration without the stream's neighbours, and its parameters one after the other. */
uint64_t launched[12];
unsigned char parameters[16384];
int parameter_bytes = 0;

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **given, void **extra) {
  uint64_t seen[] = {config->gridDimX,  config->gridDimY, config->gridDimZ,       config->blockDimX,
                     config->blockDimY, config->blockDimZ, config->sharedMemBytes, (uint64_t)config->hStream,
                     config->numAttrs,  (uint64_t)function, extra != 0};
  memcpy(launched, seen, sizeof seen);
  parameter_bytes = 0;
  for (int i = 0; i < parameter_count; ++i) {
    memcpy(parameters + parameter_bytes, given[i], parameter_sizes[i]);
    parameter_bytes += parameter_sizes[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned char *at = (unsigned char *)map;
  memset(map, 0, sizeof *map);
  memcpy(at, &address, 8);
  at[8] = type, at[9] = rank, at[10] = interleave, at[11] = swizzle, at[12] = promotion, at[13] = fill;
  memcpy(at + 16, sizes, 8 * rank);
  memcpy(at + 56, strides, 8 * (rank - 1));
  for (uint32_t i = 0; i < rank; ++i) {
    memcpy(at + 88 + 4 * i, box + i, 4);
    at[108 + i] = steps[i];
  }
  return CUDA_SUCCESS;
}

static CUresult to_int(int *to, int value) {
  *to = value;
  return CUDA_SUCCESS;
}

static CUresult to_pointer(void *to, uint64_t value) {
  memcpy(to, &value, sizeof value);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return to_pointer(context, 1); }
CUresult cuCtxGetDevice(CUdevice *device) { return to_int(device, 0); }
CUresult cuCtxGetLimit(size_t *size, CUlimit limit) { return to_pointer(size, 0); }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t size) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { return to_int(device, index); }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) { return to_int(value, 227 * 1024); }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return to_pointer(context, 1); }
CUresult cuDriverGetVersion(int *version) { return to_int(version, 13000); }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) { return to_int(value, 1024); }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult result, const char **name) { return to_pointer(name, 0); }
CUresult cuGetErrorString(CUresult result, const char **text) { return to_pointer(text, 0); }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { return to_pointer(function, 4242); }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return to_pointer(module, 1); }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *to, CUpointer_attribute attribute, CUdeviceptr from) { return to_pointer(to, from); }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return to_int((int *)status, 0); }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { return to_int(count, 1); }
