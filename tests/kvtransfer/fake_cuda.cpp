// CUDA's driver over the host's memory, for what kvtransfer/transports/cuda_driver.py calls. CUDA's own header
// declares the functions. A mapping of another process's memory has addresses that nothing else has.
#include <cuda.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

struct Exported {
    pid_t pid;
    CUdeviceptr address;
    size_t size;
};

std::mutex guard;
std::map<CUdeviceptr, Exported> mappings;
CUdeviceptr next_address = CUdeviceptr(1) << 60;
thread_local int contexts = 0;

const Exported* mapping_of(CUdeviceptr address, CUdeviceptr* base) {
    auto above = mappings.upper_bound(address);
    if (above == mappings.begin()) return nullptr;
    --above;
    *base = above->first;
    return address < above->first + above->second.size ? &above->second : nullptr;
}

}  // namespace

extern "C" {

int fake_cuda_mappings() { return int(mappings.size()); }

CUresult cuInit(unsigned int) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    *context = reinterpret_cast<CUcontext>(0x1000 + uintptr_t(device));
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    ++contexts;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext*) {
    --contexts;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
    *name = error == CUDA_ERROR_INVALID_CONTEXT   ? "CUDA_ERROR_INVALID_CONTEXT"
            : error == CUDA_ERROR_INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                                  : nullptr;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// An allocation is a mapping of the process's memory.
CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
    if (!contexts) return CUDA_ERROR_INVALID_CONTEXT;
    std::lock_guard<std::mutex> held(guard);
    if (const Exported* mapping = mapping_of(address, base)) {
        *size = mapping->size;
        return CUDA_SUCCESS;
    }
    FILE* maps = fopen("/proc/self/maps", "r");
    char line[4096];
    unsigned long first = 0, end = 0;
    CUresult found = CUDA_ERROR_INVALID_VALUE;
    while (found != CUDA_SUCCESS && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx", &first, &end) == 2 && first <= address && address < end) {
            *base = first;
            *size = end - first;
            found = CUDA_SUCCESS;
        }
    }
    fclose(maps);
    return found;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    CUdeviceptr base = 0;
    size_t size = 0;
    CUresult found = cuMemGetAddressRange(&base, &size, address);
    if (found != CUDA_SUCCESS) return found;
    if (base != address || getenv("FAKE_CUDA_EXPANDABLE")) return CUDA_ERROR_INVALID_VALUE;
    Exported exported{getpid(), address, size};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &exported, sizeof exported);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned int flags) {
    if (!contexts) return CUDA_ERROR_INVALID_CONTEXT;
    Exported exported;
    memcpy(&exported, &handle, sizeof exported);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || !exported.size) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard<std::mutex> held(guard);
    *address = next_address;
    mappings[next_address] = exported;
    next_address += exported.size + (size_t(1) << 30);
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    if (!contexts) return CUDA_ERROR_INVALID_CONTEXT;
    std::lock_guard<std::mutex> held(guard);
    return mappings.erase(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t count, CUstream) {
    if (!contexts) return CUDA_ERROR_INVALID_CONTEXT;
    CUdeviceptr base = 0;
    Exported exported;
    {
        std::lock_guard<std::mutex> held(guard);
        const Exported* mapping = mapping_of(source, &base);
        if (!mapping) return CUDA_ERROR_ILLEGAL_ADDRESS;
        exported = *mapping;
    }
    iovec ours{reinterpret_cast<void*>(target), count};
    iovec theirs{reinterpret_cast<void*>(exported.address + (source - base)), count};
    return process_vm_readv(exported.pid, &ours, 1, &theirs, 1, 0) == ssize_t(count)
               ? CUDA_SUCCESS
               : CUDA_ERROR_ILLEGAL_ADDRESS;
}
}
