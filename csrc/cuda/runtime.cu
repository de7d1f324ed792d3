#include "cuda/runtime.h"

#include <cstdlib>
#include <mutex>
#include <vector>

#include "cuda/launch.h"
#include "error.h"

namespace moepool {
namespace cuda {

namespace {

__global__ void probe() {}

// What is known of a device, asked once.
struct Known {
    bool usable = false;
    bool overlaps = false;         // launch.h
    cudaMemPool_t pool = nullptr;  // of scratch memory; the device's default pool is left to others
};

std::mutex known_mutex;
std::vector<Known> known;

// A device is usable if this build holds a kernel for it.
void learn(int device) {
    const std::lock_guard<std::mutex> lock(known_mutex);
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) {
        cudaGetLastError();
        int driver = 0, runtime = 0;
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&runtime);
        if (status == cudaErrorInsufficientDriver && driver)
            fail(MOEPOOL_ERROR_UNSUPPORTED,
                 "the NVIDIA driver supports CUDA %d.%d, this build needs %d.%d: update the driver, or use device cpu",
                 driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
        fail(MOEPOOL_ERROR_UNSUPPORTED, "no CUDA device can be used here (%s): use device cpu",
             status == cudaErrorInsufficientDriver ? "there is no NVIDIA driver" : cudaGetErrorString(status));
    }
    if (device >= count)
        fail(MOEPOOL_ERROR_ARGUMENT, "CUDA device %d does not exist: this process sees %d", device, count);
    if (known.size() < static_cast<size_t>(count)) known.resize(static_cast<size_t>(count));
    Known &k = known[static_cast<size_t>(device)];
    if (k.usable) return;
    cudaFuncAttributes attributes;
    int before = 0;
    check(cudaGetDevice(&before), "asking for the current device");
    check(cudaSetDevice(device), "selecting the device");
    const cudaError_t loaded = cudaFuncGetAttributes(&attributes, probe);
    cudaSetDevice(before);
    if (loaded != cudaSuccess) {
        cudaGetLastError();
        cudaDeviceProp properties;
        check(cudaGetDeviceProperties(&properties, device), "asking for the device's properties");
        fail(MOEPOOL_ERROR_UNSUPPORTED,
             "CUDA device %d (%s, compute capability %d.%d) has no kernel in this build (%s): build with "
             "MOEPOOL_CUDA_ARCHS=native or all, or use device cpu",
             device, properties.name, properties.major, properties.minor, cudaGetErrorString(loaded));
    }
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    check(cudaMemPoolCreate(&k.pool, &properties), "creating a memory pool for scratch");
    // Freed scratch is kept for the next call; the pools of other libraries are not touched.
    uint64_t keep = uint64_t{256} << 20;
    check(cudaMemPoolSetAttribute(k.pool, cudaMemPoolAttrReleaseThreshold, &keep), "setting up the scratch pool");
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the device");
    // Code of an older PTX, compiled anew by the driver, does not wait for the kernels in front.
    k.overlaps = major >= 9 && attributes.ptxVersion >= 90;
    k.usable = true;
}

}  // namespace

void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    if (status == cudaErrorStreamCaptureUnsupported || status == cudaErrorStreamCaptureImplicit)
        fail(MOEPOOL_ERROR_STATE, "CUDA: %s is not possible while a stream of the device is captured in a graph", what);
    fail(status == cudaErrorMemoryAllocation ? MOEPOOL_ERROR_OUT_OF_MEMORY : MOEPOOL_ERROR_CUDA, "CUDA: %s: %s (%s)",
         what, cudaGetErrorString(status), cudaGetErrorName(status));
}

OnDevice::OnDevice(int device) {
    learn(device);
    check(cudaGetDevice(&before_), "asking for the current device");
    if (before_ == device) before_ = -1;
    // Also if it is current: only this makes its context that of a thread which has called nothing yet.
    check(cudaSetDevice(device), "selecting the device");
}

OnDevice::~OnDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
}

bool capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    // Asking about the legacy stream while another one captures is an error, which means: not this one.
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    return status != cudaStreamCaptureStatusNone;
}

void Event::wait() const {
    const RelaxedCapture relaxed;
    check(cudaEventSynchronize(event_), "waiting for an event");
}

int most_shared_bytes() {
    // For tests: kernels are divided as on a device with less.
    static const char *const text = std::getenv("MOEPOOL_TEST_SHARED_BYTES");
    if (text) return std::atoi(text);
    int device = 0, most = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "asking for shared memory");
    return most;
}

bool overlaps_kernels() {
    int device = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    return known[static_cast<size_t>(device)].overlaps;
}

void *allocate_scratch(int64_t bytes, cudaStream_t stream) {
    int device = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    void *data = nullptr;
    const cudaError_t status =
        cudaMallocFromPoolAsync(&data, static_cast<size_t>(bytes), known[static_cast<size_t>(device)].pool, stream);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        fail(MOEPOOL_ERROR_OUT_OF_MEMORY, "CUDA device %d: %lld bytes of scratch memory were refused", device,
             static_cast<long long>(bytes));
    }
    check(status, "allocating scratch memory");
    return data;
}

}  // namespace cuda
}  // namespace moepool
