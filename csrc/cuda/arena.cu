#include "cuda/arena.h"

#include <cuda.h>

#include <algorithm>

#include "error.h"

namespace moepool {
namespace cuda {

namespace {

constexpr int64_t kLargestChunk = int64_t{32} << 20;

// The driver is not linked: its functions are asked for by name.
template <class Function>
Function driver(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result), "asking the driver");
#else
    check(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result), "asking the driver");
#endif
    if (result != cudaDriverEntryPointSuccess || !function)
        fail(MOEPOOL_ERROR_UNSUPPORTED, "the CUDA driver has no %s", name);
    return reinterpret_cast<Function>(function);
}

void check_driver(CUresult status, const char *what, int64_t bytes) {
    if (status == CUDA_SUCCESS) return;
    fail(status == CUDA_ERROR_OUT_OF_MEMORY ? MOEPOOL_ERROR_OUT_OF_MEMORY : MOEPOOL_ERROR_CUDA,
         "%s, %lld bytes: the CUDA driver says %d", what, static_cast<long long>(bytes), static_cast<int>(status));
}

CUmemAllocationProp kind_of_memory(int device) {
    CUmemAllocationProp kind = {};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind.location.id = device;
    return kind;
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

CUdeviceptr address(uint8_t *base, int64_t offset) { return reinterpret_cast<CUdeviceptr>(base) + offset; }

}  // namespace

Arena::Arena(int device, int64_t bytes, int64_t most) : device_(device) {
    if (most > 0) {
        try {
            reserve(std::max(bytes, most));
        } catch (const Error &) {
            // Plain memory does too: it only keeps its size.
            release();
        }
    }
    if (base_) {
        try {
            resize(bytes);
        } catch (...) {
            release();
            throw;
        }
    } else {
        plain_ = DeviceMemory<uint8_t>(bytes);
        plain_bytes_ = bytes_ = bytes;
    }
}

Arena::~Arena() { release(); }

Arena::Arena(Arena &&other) noexcept { *this = std::move(other); }

Arena &Arena::operator=(Arena &&other) noexcept {
    std::swap(device_, other.device_);
    std::swap(bytes_, other.bytes_);
    std::swap(plain_, other.plain_);
    std::swap(plain_bytes_, other.plain_bytes_);
    std::swap(base_, other.base_);
    std::swap(reserved_, other.reserved_);
    std::swap(chunk_, other.chunk_);
    std::swap(chunks_, other.chunks_);
    return *this;
}

void Arena::reserve(int64_t most) {
    const RelaxedCapture relaxed;
    const CUmemAllocationProp kind = kind_of_memory(device_);
    size_t granularity = 0;
    check_driver(driver<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity")(
                     &granularity, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                 "asking for the size of chunks", most);
    const auto least = static_cast<int64_t>(granularity);
    chunk_ = std::max(least, std::min(kLargestChunk / least * least, round_up(most / 64, least)));
    reserved_ = round_up(most, chunk_);
    CUdeviceptr base = 0;
    check_driver(
        driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve")(&base, static_cast<size_t>(reserved_), 0, 0, 0),
        "reserving addresses", reserved_);
    base_ = reinterpret_cast<uint8_t *>(base);
}

void Arena::resize(int64_t bytes) {
    if (!base_) {
        if (bytes > plain_bytes_)
            fail(MOEPOOL_ERROR_OUT_OF_MEMORY, "%lld bytes: this memory keeps its size, which is %lld bytes",
                 static_cast<long long>(bytes), static_cast<long long>(plain_bytes_));
        bytes_ = bytes;
        return;
    }
    if (bytes > reserved_)
        fail(MOEPOOL_ERROR_OUT_OF_MEMORY, "%lld bytes: addresses are reserved for %lld", static_cast<long long>(bytes),
             static_cast<long long>(reserved_));
    const RelaxedCapture relaxed;
    const auto create = driver<decltype(&cuMemCreate)>("cuMemCreate");
    const auto release = driver<decltype(&cuMemRelease)>("cuMemRelease");
    const auto map = driver<decltype(&cuMemMap)>("cuMemMap");
    const auto unmap = driver<decltype(&cuMemUnmap)>("cuMemUnmap");
    const auto set_access = driver<decltype(&cuMemSetAccess)>("cuMemSetAccess");
    const size_t before = chunks_.size(), wanted = static_cast<size_t>((bytes + chunk_ - 1) / chunk_);
    const auto drop = [&](size_t count) {
        while (chunks_.size() > count) {
            const int64_t at = static_cast<int64_t>(chunks_.size() - 1) * chunk_;
            check_driver(unmap(address(base_, at), static_cast<size_t>(chunk_)), "giving memory back", chunk_);
            check_driver(release(chunks_.back()), "giving memory back", chunk_);
            chunks_.pop_back();
        }
    };
    try {
        while (chunks_.size() < wanted) {
            const CUmemAllocationProp kind = kind_of_memory(device_);
            CUmemGenericAllocationHandle handle = 0;
            check_driver(create(&handle, static_cast<size_t>(chunk_), &kind, 0), "taking device memory", chunk_);
            const CUdeviceptr at = address(base_, static_cast<int64_t>(chunks_.size()) * chunk_);
            const CUresult mapped = map(at, static_cast<size_t>(chunk_), 0, handle, 0);
            if (mapped != CUDA_SUCCESS) release(handle);
            check_driver(mapped, "mapping device memory", chunk_);
            chunks_.push_back(handle);
            CUmemAccessDesc access = {};
            access.location = kind.location;
            access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            check_driver(set_access(at, static_cast<size_t>(chunk_), &access, 1), "mapping device memory", chunk_);
        }
    } catch (...) {
        drop(before);
        throw;
    }
    drop(wanted);
    bytes_ = bytes;
}

void Arena::release() noexcept {
    if (!base_) return;
    try {
        const OnDevice on(device_);
        const RelaxedCapture relaxed;
        cudaDeviceSynchronize();  // as cudaFree does
        resize(0);
        driver<decltype(&cuMemAddressFree)>("cuMemAddressFree")(reinterpret_cast<CUdeviceptr>(base_),
                                                                static_cast<size_t>(reserved_));
    } catch (...) {  // the driver is gone
    }
    base_ = nullptr;
}

}  // namespace cuda
}  // namespace moepool
