// The CUDA runtime, with errors as exceptions and handles that free themselves.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace moepool {
namespace cuda {

// Throws MOEPOOL_ERROR_CUDA (or OUT_OF_MEMORY) that says what was being done, and leaves no error behind in the
// runtime.
void check(cudaError_t status, const char *what);

// Makes a device current for a scope. Fails with a clear message if it does not exist, the driver is too old or the
// card has no kernel in this build.
class OnDevice {
  public:
    explicit OnDevice(int device);
    ~OnDevice();
    OnDevice(const OnDevice &) = delete;
    OnDevice &operator=(const OnDevice &) = delete;

  private:
    int before_ = -1;
};

// The stream is recording a graph. Work that the host takes part in must be refused then, before it breaks the capture.
bool capturing(cudaStream_t stream);

// In its scope this thread may allocate, copy and wait while it captures a graph on some stream: work that is no part
// of the graph.
class RelaxedCapture {
  public:
    RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture &) = delete;
    RelaxedCapture &operator=(const RelaxedCapture &) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Destructors ignore errors: at process exit the driver may be gone already.
class Event {
  public:
    Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event"); }
    ~Event() {
        if (event_) cudaEventDestroy(event_);
    }
    Event(Event &&other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;

    void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "recording an event"); }
    // Whatever `stream` is given from here on waits for what was recorded.
    void hold(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, event_, 0), "waiting for an event"); }
    // The host waits.
    void wait() const;

  private:
    cudaEvent_t event_ = nullptr;
};

class Stream {
  public:
    Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"); }
    ~Stream() {
        if (stream_) cudaStreamDestroy(stream_);
    }
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;
    operator cudaStream_t() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

// Plain device memory. Allocated and freed also while this thread captures a graph: it is no part of it.
template <class T>
class DeviceMemory {
  public:
    DeviceMemory() = default;
    explicit DeviceMemory(int64_t count) {
        const RelaxedCapture relaxed;
        if (count > 0)
            check(cudaMalloc(reinterpret_cast<void **>(&data_), static_cast<size_t>(count) * sizeof(T)),
                  "allocating device memory");
    }
    ~DeviceMemory() {
        const RelaxedCapture relaxed;
        if (data_) cudaFree(data_);
    }
    DeviceMemory(DeviceMemory &&other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
    DeviceMemory &operator=(DeviceMemory &&other) noexcept {
        std::swap(data_, other.data_);
        return *this;
    }
    T *get() const { return data_; }

  private:
    T *data_ = nullptr;
};

// One object in page-locked host memory that the device writes to.
template <class T>
class MappedMemory {
  public:
    MappedMemory() {
        const RelaxedCapture relaxed;
        check(cudaHostAlloc(reinterpret_cast<void **>(&data_), sizeof(T), cudaHostAllocMapped),
              "allocating page-locked memory");
    }
    ~MappedMemory() {
        const RelaxedCapture relaxed;
        cudaFreeHost(data_);
    }
    MappedMemory(const MappedMemory &) = delete;
    MappedMemory &operator=(const MappedMemory &) = delete;
    T *get() const { return data_; }

  private:
    T *data_ = nullptr;
};

// Device memory that is allocated and freed in the order of a stream.
template <class T>
class Scratch {
  public:
    Scratch() = default;
    Scratch(int64_t count, cudaStream_t stream);
    ~Scratch();
    Scratch(Scratch &&other) noexcept : data_(std::exchange(other.data_, nullptr)), stream_(other.stream_) {}
    Scratch &operator=(Scratch &&other) noexcept {
        std::swap(data_, other.data_);
        std::swap(stream_, other.stream_);
        return *this;
    }
    T *get() const { return data_; }

  private:
    T *data_ = nullptr;
    cudaStream_t stream_ = nullptr;
};

void *allocate_scratch(int64_t bytes, cudaStream_t stream);

template <class T>
Scratch<T>::Scratch(int64_t count, cudaStream_t stream)
    : data_(count > 0 ? static_cast<T *>(allocate_scratch(count * static_cast<int64_t>(sizeof(T)), stream)) : nullptr),
      stream_(stream) {}

template <class T>
Scratch<T>::~Scratch() {
    if (data_) cudaFreeAsync(data_, stream_);
}

}  // namespace cuda
}  // namespace moepool
