// The C ABI: each entry checks its arguments, calls one thing, and turns exceptions into a status.
#include "moepool.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/threads.h"
#include "cuda/backend.h"
#include "error.h"
#include "pool/doorbell.h"
#include "pool/pool.h"
#include "pool/route.h"
#include "quant/types.h"
#include "store/store.h"

#ifndef MOEPOOL_VERSION
#define MOEPOOL_VERSION "unknown"
#endif
#ifndef MOEPOOL_BUILD_CXX
#define MOEPOOL_BUILD_CXX __VERSION__
#endif
#ifndef MOEPOOL_BUILD_FLAGS
#define MOEPOOL_BUILD_FLAGS ""
#endif
#ifndef MOEPOOL_BUILD_CUDA
#define MOEPOOL_BUILD_CUDA ""
#endif
#ifndef MOEPOOL_BUILD_CUDA_ARCHS
#define MOEPOOL_BUILD_CUDA_ARCHS ""
#endif

struct moepool_store {
    std::shared_ptr<moepool::Store> store;
};
struct moepool_pool {
    std::shared_ptr<moepool::Pool> pool;
};
struct moepool_route {
    std::unique_ptr<moepool::Route> route;
};

namespace {

using moepool::Error;
using moepool::fail;

template <class Body>
moepool_status guarded(Body &&body) noexcept {
    try {
        body();
        return MOEPOOL_OK;
    } catch (const Error &error) {
        moepool::set_last_error(error.what());
        return error.status();
    } catch (const std::bad_alloc &) {
        moepool::set_last_error("host memory: an allocation was refused");
        return MOEPOOL_ERROR_OUT_OF_MEMORY;
    } catch (const std::exception &error) {
        moepool::set_last_error(error.what());
        return MOEPOOL_ERROR_INTERNAL;
    } catch (...) {
        moepool::set_last_error("an exception of an unknown kind");
        return MOEPOOL_ERROR_INTERNAL;
    }
}

template <class T>
T &given(T *pointer, const char *name) {
    if (!pointer) fail(MOEPOOL_ERROR_ARGUMENT, "%s is NULL", name);
    return *pointer;
}

moepool::Store &store_of(const moepool_store *store) { return *given(store, "store").store; }
moepool::Pool &pool_of(const moepool_pool *pool) { return *given(pool, "pool").pool; }
const moepool::Route &route_of(const moepool_route *route) { return *given(route, "route").route; }

void check_dtype(moepool_dtype dtype) {
    if (dtype < MOEPOOL_F32 || dtype > MOEPOOL_BF16)
        fail(MOEPOOL_ERROR_ARGUMENT, "%d is not a dtype of activations", static_cast<int>(dtype));
}

// Data of an op may be NULL only where there is none.
void check_data(const void *data, int64_t count, const char *name) {
    if (count > 0 && !data) fail(MOEPOOL_ERROR_ARGUMENT, "%s is NULL", name);
}

void check_device(int32_t device) {
    if (device < 0) fail(MOEPOOL_ERROR_ARGUMENT, "%d is not the number of a CUDA device", device);
}

template <class Call>
void with_cuda(const Call &call) {
#if MOEPOOL_CUDA
    call();
#else
    (void)call;
    fail(MOEPOOL_ERROR_UNSUPPORTED, "this build of moepool has no CUDA");
#endif
}

void check_count(int64_t count) {
    if (count < 0) fail(MOEPOOL_ERROR_ARGUMENT, "a count of %lld", static_cast<long long>(count));
}

void check_rows(const moepool_rows *x, const moepool::Route &route) {
    check_dtype(given(x, "x").dtype);
    check_data(x->data, route.places(), "x->data");
}

void check_ffn(const moepool::Layer &layer) {
    const std::vector<moepool::Matrix> &m = layer.matrices();
    if (m.size() != 3)
        fail(MOEPOOL_ERROR_STATE, "the layer has %d matrices: an FFN needs gate, up and down",
             static_cast<int>(m.size()));
    if (m[0].rows != m[1].rows || m[0].columns != m[1].columns || m[2].columns != m[0].rows)
        fail(MOEPOOL_ERROR_STATE, "gate (%lld, %lld), up (%lld, %lld) and down (%lld, %lld) do not make an FFN",
             static_cast<long long>(m[0].rows), static_cast<long long>(m[0].columns), static_cast<long long>(m[1].rows),
             static_cast<long long>(m[1].columns), static_cast<long long>(m[2].rows),
             static_cast<long long>(m[2].columns));
}

}  // namespace

// ------------------------------------------------------------------------------------------------ status and version

int32_t moepool_abi_version(void) { return MOEPOOL_ABI_VERSION; }

const char *moepool_last_error(void) { return moepool::last_error(); }

const char *moepool_build_info(void) {
    // Made once and kept: it is static storage for the caller. The strings of the build are escaped by it.
    static const std::string *info = [] {
        const bool cuda = *MOEPOOL_BUILD_CUDA != 0;
        auto *text = new std::string("{\"version\": \"" MOEPOOL_VERSION "\", \"compiler\": \"" MOEPOOL_BUILD_CXX
                                     "\", \"flags\": \"" MOEPOOL_BUILD_FLAGS "\", \"cuda\": ");
        *text += cuda ? "\"" MOEPOOL_BUILD_CUDA "\", \"cuda_archs\": \"" MOEPOOL_BUILD_CUDA_ARCHS "\""
                      : "null, \"cuda_archs\": null";
        *text += ", \"cpu_kernels\": [";
        for (int i = 0; i < moepool::kernel_set_count(); ++i)
            *text += std::string(i ? ", \"" : "\"") + moepool::kernel_set(i).name + "\"";
        *text += "]}";
        return text;
    }();
    return info->c_str();
}

// -------------------------------------------------------------------------------------------------------------- types

int32_t moepool_type_count(void) { return moepool::kTypeCount; }

moepool_status moepool_type_at(int32_t index, moepool_type_info *info) {
    return guarded([&] {
        if (index < 0 || index >= moepool::kTypeCount)
            fail(MOEPOOL_ERROR_ARGUMENT, "type index %d is outside [0, %d)", index, moepool::kTypeCount);
        const moepool::TypeInfo &type = moepool::type_info(index);
        given(info, "info") = {type.id, type.block, type.block_bytes, type.panel_words(moepool::kChunkColumns),
                               type.name};
    });
}

// ---------------------------------------------------------------------------------------------------------------- CPU

int32_t moepool_cpu_kernel_count(void) { return moepool::kernel_set_count(); }

moepool_status moepool_cpu_kernel_at(int32_t index, const char **name, int32_t *usable) {
    return guarded([&] {
        if (index < 0 || index >= moepool::kernel_set_count())
            fail(MOEPOOL_ERROR_ARGUMENT, "kernel set index %d is outside [0, %d)", index, moepool::kernel_set_count());
        given(name, "name");
        given(usable, "usable");
        *name = moepool::kernel_set(index).name;
        *usable = !moepool::kernel_set(index).lacks();
    });
}

const char *moepool_cpu_kernel_lacks(int32_t index) {
    if (index < 0 || index >= moepool::kernel_set_count()) return nullptr;
    return moepool::kernel_set(index).lacks();
}

moepool_status moepool_cpu_select(const char *name) {
    return guarded([&] { moepool::select_kernels(name); });
}

const char *moepool_cpu_selected(void) { return moepool::kernels().name; }

moepool_status moepool_set_threads(int32_t threads) {
    return guarded([&] { moepool::set_threads(threads, nullptr, 0); });
}

moepool_status moepool_set_threads_on(int32_t threads, const int32_t *cpus, int32_t count) {
    return guarded([&] { moepool::set_threads(threads, cpus, count); });
}

void moepool_set_interrupt(moepool_interrupt check, void *data) { moepool::set_interrupt(check, data); }

int32_t moepool_get_threads(void) {
    int32_t threads = 0;
    const moepool_status status = guarded([&] { threads = moepool::get_threads(); });
    return status == MOEPOOL_OK ? threads : -static_cast<int32_t>(status);
}

// --------------------------------------------------------------------------------------------------------------- CUDA

moepool_status moepool_cuda_devices(int32_t *count) {
    return guarded([&] {
        given(count, "count");
        with_cuda([&] { *count = moepool::cuda::device_count(); });
    });
}

moepool_status moepool_cuda_device(int32_t device, moepool_device_info *info) {
    return guarded([&] {
        given(info, "info");
        check_device(device);
        with_cuda([&] { *info = moepool::cuda::device_info(device); });
    });
}

moepool_status moepool_set_pinned_limit(int64_t bytes) {
    return guarded([&] {
        if (bytes < 0) fail(MOEPOOL_ERROR_ARGUMENT, "a limit of %lld bytes: at least 0", static_cast<long long>(bytes));
        moepool::pinned_limit.store(bytes);
    });
}

moepool_status moepool_set_doorbell(const moepool_doorbell_settings *settings) {
    return guarded([&] {
        const moepool_doorbell_settings &wanted = given(settings, "settings");
        constexpr int64_t kMost = int64_t{1} << 40;
        if (wanted.timeout_us < 1 || wanted.timeout_us > kMost)
            fail(MOEPOOL_ERROR_ARGUMENT, "a time-out of %lld us: at least 1 and at most %lld",
                 static_cast<long long>(wanted.timeout_us), static_cast<long long>(kMost));
        if (wanted.host_nodes < -1 || wanted.host_nodes > 1)
            fail(MOEPOOL_ERROR_ARGUMENT, "host_nodes is %d: it must be -1, 0 or 1", wanted.host_nodes);
        if (wanted.stall_us < -1 || wanted.stall_us > kMost)
            fail(MOEPOOL_ERROR_ARGUMENT, "stall_us is %lld: it must be -1 to %lld",
                 static_cast<long long>(wanted.stall_us), static_cast<long long>(kMost));
        if (wanted.period == 0 || wanted.period < -INT32_MAX)
            fail(MOEPOOL_ERROR_ARGUMENT, "period is %d: it must not be 0", wanted.period);
        moepool::doorbell::Settings &now = moepool::doorbell::settings();
        now.timeout_us.store(wanted.timeout_us);
        now.host_nodes.store(wanted.host_nodes);
        now.period.store(wanted.period);
        now.stall_us.store(wanted.stall_us);
    });
}

void moepool_get_doorbell(moepool_doorbell_settings *settings) {
    if (!settings) return;
    const moepool::doorbell::Settings &now = moepool::doorbell::settings();
    *settings = {now.timeout_us.load(), now.host_nodes.load(), now.period.load(), now.stall_us.load()};
}

moepool_status moepool_cuda_pointer_device(const void *pointer, int32_t *device) {
    return guarded([&] {
        given(device, "device");
        with_cuda([&] { *device = moepool::cuda::pointer_device(pointer); });
    });
}

moepool_status moepool_cuda_stream_capturing(int32_t device, void *stream, int32_t *capturing) {
    return guarded([&] {
        check_device(device);
        given(capturing, "capturing");
        with_cuda([&] { *capturing = moepool::cuda::stream_capturing(device, stream); });
    });
}

moepool_status moepool_cuda_stream_order(int32_t device, void *earlier, void *later) {
    return guarded([&] {
        check_device(device);
        with_cuda([&] { moepool::cuda::stream_order(device, earlier, later); });
    });
}

moepool_status moepool_cuda_stream_wait(int32_t device, void *stream) {
    return guarded([&] {
        check_device(device);
        with_cuda([&] { moepool::cuda::stream_wait(device, stream); });
    });
}

// -------------------------------------------------------------------------------------------------------------- store

moepool_status moepool_store_create(moepool_store **store) {
    return guarded([&] { given(store, "store") = new moepool_store{std::make_shared<moepool::Store>()}; });
}

void moepool_store_destroy(moepool_store *store) { delete store; }

moepool_status moepool_store_add_layer(moepool_store *store, int32_t experts, int32_t count,
                                       const moepool_matrix *matrices, int32_t *layer) {
    return guarded([&] {
        given(layer, "layer");
        *layer = store_of(store).add_layer(experts, matrices, count);
    });
}

moepool_status moepool_store_pack(moepool_store *store, int32_t layer, int32_t matrix, int32_t expert, int32_t count,
                                  const void *blocks, int64_t expert_stride) {
    return guarded([&] {
        store_of(store).pack(layer, matrix, expert, count, static_cast<const uint8_t *>(blocks), expert_stride);
    });
}

moepool_status moepool_store_unpack(const moepool_store *store, int32_t layer, int32_t matrix, int32_t expert,
                                    void *blocks) {
    return guarded([&] { store_of(store).unpack(layer, matrix, expert, static_cast<uint8_t *>(blocks)); });
}

moepool_status moepool_store_set_bias(moepool_store *store, int32_t layer, int32_t matrix, int32_t expert,
                                      const float *bias) {
    return guarded([&] { store_of(store).set_bias(layer, matrix, expert, bias); });
}

moepool_status moepool_store_set_scale(moepool_store *store, int32_t layer, int32_t matrix, int32_t expert,
                                       const float *scale) {
    return guarded([&] { store_of(store).set_scale(layer, matrix, expert, scale); });
}

moepool_status moepool_store_seal(moepool_store *store) {
    return guarded([&] { store_of(store).seal(); });
}

int32_t moepool_store_layers(const moepool_store *store) { return store ? store->store->layers() : 0; }

moepool_status moepool_store_layer(const moepool_store *store, int32_t layer, moepool_layer_info *info) {
    return guarded([&] {
        const moepool::Layer &l = store_of(store).layer(layer);
        given(info, "info") = {l.experts(), static_cast<int32_t>(l.matrices().size()), l.record_bytes(), l.bytes(),
                               l.pinned_bytes()};
    });
}

// --------------------------------------------------------------------------------------------------------------- pool

void moepool_pool_config_init(moepool_pool_config *config) {
    if (!config) return;
    *config = {};
    config->device = MOEPOOL_CPU;
    config->policy = MOEPOOL_POLICY_LRU;
    config->miss = MOEPOOL_MISS_STREAM;
    config->prompt_tokens = 32;
    config->admit = -1;
    const moepool::PolicyConfig policy;
    config->half_life = policy.half_life;
    config->weight = policy.weight;
    config->period = policy.period;
    config->protected_percent = policy.protected_percent;
}

moepool_status moepool_pool_create(const moepool_store *store, const moepool_pool_config *config, moepool_pool **pool) {
    return guarded([&] {
        given(pool, "pool");
        given(config, "config");
        *pool = new moepool_pool{std::make_shared<moepool::Pool>(given(store, "store").store, *config)};
    });
}

void moepool_pool_destroy(moepool_pool *pool) { delete pool; }

moepool_status moepool_pool_get_stats(const moepool_pool *pool, moepool_pool_stats *stats) {
    return guarded([&] { given(stats, "stats") = pool_of(pool).stats(); });
}

moepool_status moepool_pool_tables(const moepool_pool *pool, int32_t *slot_of, int32_t *expert_in) {
    return guarded([&] { pool_of(pool).tables(slot_of, expert_in); });
}

moepool_status moepool_pool_prefetch(moepool_pool *pool, const int32_t *experts, int32_t count, int32_t *admitted) {
    return guarded([&] {
        check_data(experts, count, "experts");
        const int came = pool_of(pool).prefetch(experts, count);
        if (admitted) *admitted = came;
    });
}

moepool_status moepool_pool_resize(moepool_pool *pool, int32_t slots, int32_t *made) {
    return guarded([&] {
        const int count = pool_of(pool).resize(slots);
        if (made) *made = count;
    });
}

moepool_status moepool_pool_save(const moepool_pool *pool, void *data, int64_t capacity, int64_t *size) {
    return guarded([&] {
        given(size, "size");
        const std::vector<uint8_t> state = pool_of(pool).save();
        *size = static_cast<int64_t>(state.size());
        if (capacity >= *size) std::memcpy(&given(static_cast<uint8_t *>(data), "data"), state.data(), state.size());
    });
}

moepool_status moepool_pool_load(moepool_pool *pool, const void *data, int64_t size) {
    return guarded([&] {
        check_data(data, size, "data");
        check_count(size);
        pool_of(pool).load(static_cast<const uint8_t *>(data), size);
    });
}

moepool_status moepool_pool_trace_start(moepool_pool *pool, int64_t room_bytes) {
    return guarded([&] { pool_of(pool).start_trace(room_bytes); });
}

moepool_status moepool_pool_trace_stop(moepool_pool *pool) {
    return guarded([&] { pool_of(pool).stop_trace(); });
}

moepool_status moepool_pool_trace_fetch(moepool_pool *pool, moepool_trace_counts *counts) {
    return guarded([&] { given(counts, "counts") = pool_of(pool).fetch_trace(); });
}

moepool_status moepool_pool_trace_take(moepool_pool *pool, const moepool_trace_counts *counts,
                                       const moepool_trace_arrays *arrays) {
    return guarded([&] {
        const moepool_trace_counts &c = given(counts, "counts");
        const moepool_trace_arrays &a = given(arrays, "arrays");
        for (const void *array :
             {static_cast<const void *>(a.tick), static_cast<const void *>(a.tokens), static_cast<const void *>(a.k),
              static_cast<const void *>(a.phase), static_cast<const void *>(a.bypass)})
            check_data(array, c.steps, "an array of the trace's steps");
        check_data(a.ids, c.places, "ids");
        for (const void *array : {static_cast<const void *>(a.admission_step), static_cast<const void *>(a.expert),
                                  static_cast<const void *>(a.slot), static_cast<const void *>(a.evicted)})
            check_data(array, c.admissions, "an array of the trace's admissions");
        pool_of(pool).take_trace(c, a);
    });
}

// -------------------------------------------------------------------------------------------------------------- route

moepool_status moepool_pool_resolve(moepool_pool *pool, const moepool_ids *ids, moepool_phase phase, void *stream,
                                    moepool_route **route) {
    return guarded([&] {
        given(route, "route");
        auto handle = std::make_unique<moepool_route>();
        handle->route = pool_of(pool).resolve(given(ids, "ids"), phase, stream);
        *route = handle.release();
    });
}

moepool_status moepool_pool_resolve_chosen(moepool_pool *pool, const moepool_ids *ids, moepool_phase phase,
                                           const moepool_admission *admissions, int32_t count, void *stream,
                                           moepool_route **route) {
    return guarded([&] {
        given(route, "route");
        check_count(count);
        check_data(admissions, count, "admissions");
        std::vector<moepool::Residency::Choice> chosen;
        for (int32_t i = 0; i < count; ++i) chosen.push_back({admissions[i].expert, admissions[i].slot});
        auto handle = std::make_unique<moepool_route>();
        handle->route = pool_of(pool).resolve(given(ids, "ids"), phase, stream, &chosen);
        *route = handle.release();
    });
}

void moepool_route_release(moepool_route *route) { delete route; }

moepool_status moepool_route_get_info(const moepool_route *route, moepool_route_info *info) {
    return guarded([&] { given(info, "info") = route_of(route).info; });
}

moepool_status moepool_route_tables(const moepool_route *route, int32_t *hot, int32_t *cold) {
    return guarded([&] { route_of(route).tables(hot, cold); });
}

// ---------------------------------------------------------------------------------------------------------------- ops

moepool_status moepool_matmul_id(const moepool_route *route, int32_t matrix, moepool_half half, const moepool_rows *x,
                                 float *out, void *stream) {
    return guarded([&] {
        const moepool::Route &r = route_of(route);
        const int matrices = static_cast<int>(r.pool().layer().matrices().size());
        if (matrix < 0 || matrix >= matrices)
            fail(MOEPOOL_ERROR_ARGUMENT, "matrix %d of a layer with %d matrices", matrix, matrices);
        if (half < MOEPOOL_ALL || half > MOEPOOL_COLD)
            fail(MOEPOOL_ERROR_ARGUMENT, "%d is not a half", static_cast<int>(half));
        check_rows(x, r);
        check_data(out, r.places(), "out");
        if (r.places()) r.pool().on().matmul_id(r, matrix, half, *x, out, stream);
    });
}

moepool_status moepool_ffn(const moepool_route *route, const moepool_rows *x, const void *weights,
                           moepool_dtype weights_dtype, float *out, void *stream) {
    return guarded([&] {
        const moepool::Route &r = route_of(route);
        check_ffn(r.pool().layer());
        check_rows(x, r);
        check_dtype(weights_dtype);
        check_data(weights, r.places(), "weights");
        check_data(out, r.places(), "out");
        if (r.places()) r.pool().on().ffn(r, *x, weights, weights_dtype, out, stream);
    });
}

moepool_status moepool_pool_ffn(moepool_pool *pool, const moepool_ids *ids, moepool_phase phase, const moepool_rows *x,
                                const void *weights, moepool_dtype weights_dtype, float *out, void *stream) {
    return guarded([&] {
        moepool::Pool &p = pool_of(pool);
        check_ffn(p.layer());
        check_dtype(given(x, "x").dtype);
        check_dtype(weights_dtype);
        const int64_t tokens = given(ids, "ids").tokens;
        check_data(x->data, tokens, "x->data");
        check_data(weights, tokens, "weights");
        check_data(out, tokens, "out");
        p.ffn(*ids, phase, *x, weights, weights_dtype, out, stream);
    });
}

moepool_status moepool_pool_describe(moepool_pool *pool, int64_t tokens, int64_t k, char *text, int64_t size) {
    return guarded([&] {
        given(text, "text");
        if (tokens < 0 || k < 1) fail(MOEPOOL_ERROR_ARGUMENT, "tokens must be at least 0, k at least 1");
        if (size < 1) fail(MOEPOOL_ERROR_ARGUMENT, "size must be at least 1");
        const std::string words = pool_of(pool).describe(tokens, k);
        const size_t count = std::min(words.size(), static_cast<size_t>(size) - 1);
        std::memcpy(text, words.data(), count);
        text[count] = 0;
    });
}

moepool_status moepool_swiglu(int32_t device, int64_t count, const float *gate, const float *up, float *out,
                              void *stream) {
    return guarded([&] {
        check_data(gate, count, "gate");
        check_data(up, count, "up");
        check_data(out, count, "out");
        check_count(count);
        const moepool::Backend &backend = moepool::backend(device);
        if (count > 0) backend.swiglu(count, gate, up, out, stream);
    });
}

moepool_status moepool_add(int32_t device, int64_t count, const float *a, const float *b, float *out, void *stream) {
    return guarded([&] {
        check_data(a, count, "a");
        check_data(b, count, "b");
        check_data(out, count, "out");
        check_count(count);
        const moepool::Backend &backend = moepool::backend(device);
        if (count > 0) backend.add(count, a, b, out, stream);
    });
}

moepool_status moepool_combine(const moepool_route *route, int64_t columns, const float *rows, const void *weights,
                               moepool_dtype weights_dtype, float *out, void *stream) {
    return guarded([&] {
        const moepool::Route &r = route_of(route);
        if (columns < 1) fail(MOEPOOL_ERROR_ARGUMENT, "%lld columns: at least one", static_cast<long long>(columns));
        check_dtype(weights_dtype);
        check_data(rows, r.places(), "rows");
        check_data(weights, r.places(), "weights");
        check_data(out, r.places(), "out");
        if (r.places()) r.pool().on().combine(r, columns, rows, weights, weights_dtype, out, stream);
    });
}
