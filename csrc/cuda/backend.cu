#include "cuda/backend.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/elementwise.h"
#include "cuda/matmul.h"
#include "cuda/runtime.h"
#include "cuda/slots.h"
#include "error.h"
#include "pool/pool.h"
#include "pool/route.h"

namespace moepool {
namespace cuda {

namespace {

cudaStream_t stream_of(void *stream) { return static_cast<cudaStream_t>(stream); }

size_t element_bytes(moepool_dtype dtype) { return dtype == MOEPOOL_F32 ? 4 : 2; }

// Activation rows in device memory, widened and quantised as the matrices need.
class Rows {
  public:
    Rows(const void *data, moepool_dtype dtype, int64_t count, int64_t columns, bool floats, bool quantised,
         int64_t per_row, cudaStream_t stream) {
        const int64_t elements = count * columns, blocks = elements / kBlockColumns;
        const bool widened = floats && dtype != MOEPOOL_F32;
        if (widened) x_ = Scratch<float>(elements, stream);
        if (quantised) {
            q_ = Scratch<int8_t>(elements, stream);
            d_ = Scratch<float>(blocks, stream);
            e_ = Scratch<float>(blocks, stream);
            sums_ = Scratch<int2>(blocks, stream);
        }
        if (widened || quantised)
            activate(data, dtype, count, columns, x_.get(), q_.get(), d_.get(), e_.get(), sums_.get(), stream);
        view_ = {
            widened ? x_.get() : static_cast<const float *>(data), q_.get(), d_.get(), e_.get(), sums_.get(), per_row};
    }
    const Activations &view() const { return view_; }

  private:
    Scratch<float> x_;
    Scratch<int8_t> q_;
    Scratch<float> d_, e_;
    Scratch<int2> sums_;
    Activations view_;
};

// One op on a route: on the pool's device, in the order of the caller's stream, behind the fills.
class Op {
  public:
    Op(const Route &route, void *stream)
        : on_(route.pool().device()), route_(static_cast<CudaRoute &>(*route.device)), stream_(stream_of(stream)) {
        route_.begin(stream_);
    }
    CudaRoute &route() const { return route_; }
    cudaStream_t stream() const { return stream_; }
    // Also of an op that fails half way: what it has launched reads the route and its slots.
    ~Op() {
        try {
            route_.end(stream_);
        } catch (...) {  // the device is lost
        }
    }
    Op(const Op &) = delete;
    Op &operator=(const Op &) = delete;

  private:
    const OnDevice on_;
    CudaRoute &route_;
    const cudaStream_t stream_;
};

// The groups that no slot serves, if this half wants them.
std::vector<Route::Group> cold_groups(const Route &route, moepool_half half) {
    std::vector<Route::Group> cold;
    for (const Route::Group &group : route.groups)
        if (group.slot < 0 && half != MOEPOOL_HOT) cold.push_back(group);
    return cold;
}

class CudaBackend : public Backend {
  public:
    explicit CudaBackend(int device) : device_(device) {}

    std::unique_ptr<Slots> make_slots(const Layer &layer, int count, int most, int64_t budget_bytes) const override {
        const OnDevice on(device_);
        return std::make_unique<CudaSlots>(device_, layer, count, most, budget_bytes);
    }

    void require_host(void *stream, const char *what) const override {
        const OnDevice on(device_);
        if (capturing(stream_of(stream)))
            fail(MOEPOOL_ERROR_STATE,
                 "%s needs the host and can not be captured in a CUDA graph: resolve before the capture, with all "
                 "experts resident, and capture ops on the route",
                 what);
    }

    void read(void *host, const void *device, int64_t bytes, void *stream) const override {
        if (bytes == 0) return;
        const OnDevice on(device_);
        check(cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_of(stream)),
              "copying to the host");
        check(cudaStreamSynchronize(stream_of(stream)), "waiting for the stream");
    }

    void matmul_id(const Route &route, int matrix, moepool_half half, const moepool_rows &x, float *out,
                   void *stream) const override {
        const Matrix &m = route.pool().layer().matrices()[static_cast<size_t>(matrix)];
        const std::vector<Route::Group> cold = cold_groups(route, half);
        if (!cold.empty()) require_host(stream, "a miss");
        const Op op(route, stream);
        const int64_t per_row = x.per_place ? 1 : route.k();
        HostHalf host(route, x, m.columns, m.rows, !cold.empty() && on_host(route), op.stream());
        cuda::clear(route.places(), m.rows, op.route().ids(), out, op.stream());
        {
            const Rows rows(x.data, x.dtype, route.places() / per_row, m.columns, !m.quantised(), m.quantised(),
                            per_row, op.stream());
            const auto run = [&](const Tiles &tiles) {
                multiply(m, tiles.data.get(), tiles.count, tiles.largest, op.route().order(), rows.view(), out,
                         op.stream());
            };
            if (half != MOEPOOL_COLD) run(op.route().hot());
            if (!host.wanted())
                slots(route).stage(cold, m.panels, m.panels + m.row_group * m.row_groups(), op.stream(), run);
        }
        host.join(out, [&](const moepool_rows &rows, float *cold_rows) {
            cpu_backend().matmul_id(route, matrix, MOEPOOL_COLD, rows, cold_rows, nullptr);
        });
    }

    void ffn(const Route &route, const moepool_rows &x, const void *weights, moepool_dtype weights_dtype, float *out,
             void *stream) const override {
        const std::vector<Matrix> &matrices = route.pool().layer().matrices();
        const Matrix &gate = matrices[0], &up = matrices[1], &down = matrices[2];
        const std::vector<Route::Group> cold = cold_groups(route, MOEPOOL_ALL);
        if (!cold.empty()) require_host(stream, "a miss");
        const Op op(route, stream);
        const cudaStream_t s = op.stream();
        const int64_t places = route.places(), per_row = x.per_place ? 1 : route.k();
        HostHalf host(route, x, gate.columns, down.rows, !cold.empty() && on_host(route), s);
        const Scratch<float> g(places * gate.rows, s), u(places * up.rows, s), o(places * down.rows, s);
        const auto run = [&](const Matrix &m, const Tiles &tiles, const Rows &rows, float *target) {
            multiply(m, tiles.data.get(), tiles.count, tiles.largest, op.route().order(), rows.view(), target, s);
        };
        // Rows that nothing computes must be zeros all the same: they go through swiglu with the others.
        cuda::clear(places, gate.rows, op.route().ids(), g.get(), s);
        cuda::clear(places, up.rows, op.route().ids(), u.get(), s);
        {
            const Rows rows(x.data, x.dtype, places / per_row, gate.columns, !gate.quantised() || !up.quantised(),
                            gate.quantised() || up.quantised(), per_row, s);
            const auto both = [&](const Tiles &tiles) {
                run(gate, tiles, rows, g.get());
                run(up, tiles, rows, u.get());
            };
            both(op.route().hot());
            if (!host.wanted()) slots(route).stage(cold, gate.panels, down.panels, s, both);
        }
        cuda::swiglu(places * gate.rows, g.get(), u.get(), g.get(), s);
        cuda::clear(places, down.rows, op.route().ids(), o.get(), s);
        {
            const Rows hidden(g.get(), MOEPOOL_F32, places, down.columns, !down.quantised(), down.quantised(), 1, s);
            const auto last = [&](const Tiles &tiles) { run(down, tiles, hidden, o.get()); };
            last(op.route().hot());
            if (!host.wanted())
                slots(route).stage(cold, down.panels, down.panels + down.row_group * down.row_groups(), s, last);
        }
        host.join(o.get(), [&](const moepool_rows &rows, float *cold_rows) { cpu_cold_chain(route, rows, cold_rows); });
        cuda::combine(route.tokens(), route.k(), down.rows, op.route().ids(), o.get(), weights, weights_dtype, out, s);
    }

    void combine(const Route &route, int64_t columns, const float *rows, const void *weights,
                 moepool_dtype weights_dtype, float *out, void *stream) const override {
        const Op op(route, stream);
        cuda::combine(route.tokens(), route.k(), columns, op.route().ids(), rows, weights, weights_dtype, out,
                      op.stream());
    }

    void swiglu(int64_t count, const float *gate, const float *up, float *out, void *stream) const override {
        const OnDevice on(device_);
        cuda::swiglu(count, gate, up, out, stream_of(stream));
    }

    void add(int64_t count, const float *a, const float *b, float *out, void *stream) const override {
        const OnDevice on(device_);
        cuda::add(count, a, b, out, stream_of(stream));
    }

  private:
    static bool on_host(const Route &route) { return route.pool().miss() != MOEPOOL_MISS_STREAM; }
    static CudaSlots &slots(const Route &route) {
        return static_cast<CudaSlots &>(const_cast<Slots &>(route.pool().slots()));
    }

    // The cold half on the CPU, beside what the device was given before join: activations come to the host, zero-padded
    // rows go back and are added.
    class HostHalf {
      public:
        HostHalf(const Route &route, const moepool_rows &x, int64_t columns, int64_t rows, bool wanted,
                 cudaStream_t stream)
            : wanted_(wanted), x_(x), count_(route.places() * rows), stream_(stream) {
            if (!wanted) return;
            bytes_ =
                route.places() / (x.per_place ? 1 : route.k()) * columns * static_cast<int64_t>(element_bytes(x.dtype));
            lane_ = std::make_unique<Stream>();
            sum_ = Scratch<float>(count_, stream);
            begun_ = std::make_unique<Event>();
            begun_->record(stream);
            begun_->hold(*lane_);
        }
        bool wanted() const { return wanted_; }

        // compute(x on the host, rows on the host); out += the rows.
        template <class Compute>
        void join(float *out, const Compute &compute) {
            if (!wanted_) return;
            const std::unique_ptr<uint8_t[]> x(new uint8_t[static_cast<size_t>(bytes_)]);
            const std::unique_ptr<float[]> rows(new float[static_cast<size_t>(count_)]);
            check(cudaMemcpyAsync(x.get(), x_.data, static_cast<size_t>(bytes_), cudaMemcpyDeviceToHost, *lane_),
                  "copying activations to the host");
            check(cudaStreamSynchronize(*lane_), "waiting for activations");
            compute(moepool_rows{x.get(), x_.dtype, x_.per_place}, rows.get());
            check(cudaMemcpyAsync(sum_.get(), rows.get(), static_cast<size_t>(count_) * sizeof(float),
                                  cudaMemcpyHostToDevice, *lane_),
                  "copying rows to the device");
            check(cudaStreamSynchronize(*lane_), "waiting for rows");
            cuda::add(count_, out, sum_.get(), out, stream_);
        }

      private:
        const bool wanted_;
        const moepool_rows x_;
        const int64_t count_;
        const cudaStream_t stream_;
        int64_t bytes_ = 0;
        std::unique_ptr<Stream> lane_;
        std::unique_ptr<Event> begun_;
        Scratch<float> sum_;
    };

    const int device_;
};

}  // namespace

const Backend &backend(int device) {
    static std::mutex mutex;
    static auto *backends = new std::vector<std::unique_ptr<CudaBackend>>;  // for the life of the process
    const OnDevice on(device);                                              // checks the device
    const std::lock_guard<std::mutex> lock(mutex);
    if (backends->size() <= static_cast<size_t>(device)) backends->resize(static_cast<size_t>(device) + 1);
    auto &made = (*backends)[static_cast<size_t>(device)];
    if (!made) made = std::make_unique<CudaBackend>(device);
    return *made;
}

int device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    const OnDevice on(0);  // fails, and says why
    return 0;
}

moepool_device_info device_info(int device) {
    const OnDevice on(device);
    moepool_device_info info = {};
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device), "asking for the device's properties");
    std::snprintf(info.name, sizeof info.name, "%s", properties.name);
    check(cudaDeviceGetPCIBusId(info.pci_bus_id, sizeof info.pci_bus_id, device), "asking for the PCI id");
    const auto *u = reinterpret_cast<const unsigned char *>(properties.uuid.bytes);
    std::snprintf(info.uuid, sizeof info.uuid,
                  "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3],
                  u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    info.compute_major = properties.major;
    info.compute_minor = properties.minor;
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "asking for free memory");
    info.free_bytes = static_cast<int64_t>(free);
    info.total_bytes = static_cast<int64_t>(total);
    return info;
}

int pointer_device(const void *pointer) {
    device_count();  // fails with a clear message where there is no driver
    cudaPointerAttributes attributes = {};
    check(cudaPointerGetAttributes(&attributes, pointer), "asking where memory lies");
    const bool there = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    return there ? attributes.device : MOEPOOL_CPU;
}

bool stream_capturing(int device, void *stream) {
    const OnDevice on(device);
    return capturing(stream_of(stream));
}

void stream_order(int device, void *earlier, void *later) {
    const OnDevice on(device);
    const cudaStream_t first = stream_of(earlier), second = stream_of(later);
    // An event across the border of a capture would break the capture.
    if (first == second || capturing(first) != capturing(second)) return;
    Event event;
    event.record(first);
    event.hold(second);
}

void stream_wait(int device, void *stream) {
    const OnDevice on(device);
    if (!capturing(stream_of(stream))) check(cudaStreamSynchronize(stream_of(stream)), "waiting for the stream");
}

}  // namespace cuda
}  // namespace moepool
