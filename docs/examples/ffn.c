/* A layer of experts with the C interface: on the first CUDA device if there is one, and on the CPU. The bytes agree.
 *
 *     PACKAGE=$(python3 -c 'import moepool, os; print(os.path.dirname(moepool.__file__))')
 *     nvcc ffn.c -o ffn -I$PACKAGE/include -L$PACKAGE/lib -lmoepool -Xlinker -rpath,$PACKAGE/lib
 *
 * Without the CUDA toolkit: cc -DCPU_ONLY ffn.c -o ffn -I$PACKAGE/include -L$PACKAGE/lib -lmoepool
 * -Wl,-rpath,$PACKAGE/lib
 */
#ifndef CPU_ONLY
#include <cuda_runtime_api.h>
#endif
#include <moepool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 8, SLOTS = 4, HIDDEN = 64, WIDTH = 96, TOKENS = 3, PLACES = 2, F32 = 0 };

#define CHECK(call)                                                           \
    do {                                                                      \
        if ((call) != MOEPOOL_OK) {                                           \
            fprintf(stderr, "line %d: %s\n", __LINE__, moepool_last_error()); \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

static float next(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 24) - 0.5f;
}

static void fill(float *values, size_t count) {
    for (size_t i = 0; i < count; ++i) values[i] = next();
}

/* A store with one layer. A loader would pack the blocks of a GGUF file; here they are float32 numbers. */
static moepool_store *make_store(void) {
    static const int64_t rows[3] = {WIDTH, WIDTH, HIDDEN}, columns[3] = {HIDDEN, HIDDEN, WIDTH};
    static float blocks[EXPERTS * WIDTH * HIDDEN];
    moepool_matrix matrices[3];
    moepool_store *store = NULL;
    int32_t layer;

    memset(matrices, 0, sizeof matrices);
    for (int i = 0; i < 3; ++i) {
        matrices[i].type = F32;
        matrices[i].rows = rows[i];
        matrices[i].columns = columns[i];
    }
    CHECK(moepool_store_create(&store));
    CHECK(moepool_store_add_layer(store, EXPERTS, 3, matrices, &layer));
    for (int i = 0; i < 3; ++i) {
        fill(blocks, sizeof blocks / sizeof *blocks);
        CHECK(moepool_store_pack(store, layer, i, 0, EXPERTS, blocks, rows[i] * columns[i] * (int64_t)sizeof(float)));
    }
    CHECK(moepool_store_seal(store));
    return store;
}

/* The memory of a device, or of the host for the CPU. */
static void *allocate(int32_t device, size_t bytes, const void *content) {
    void *data = NULL;
#ifndef CPU_ONLY
    if (device != MOEPOOL_CPU) {
        if (cudaSetDevice(device) != cudaSuccess || cudaMalloc(&data, bytes) != cudaSuccess) exit(1);
        if (content && cudaMemcpy(data, content, bytes, cudaMemcpyHostToDevice) != cudaSuccess) exit(1);
        return data;
    }
#endif
    (void)device;
    data = malloc(bytes);
    if (!data) exit(1);
    if (content) memcpy(data, content, bytes);
    return data;
}

/* Copies a result to the host, once it is there, and frees it. */
static void take(int32_t device, void *data, void *host, size_t bytes) {
#ifndef CPU_ONLY
    if (device != MOEPOOL_CPU) {
        if (host && cudaMemcpy(host, data, bytes, cudaMemcpyDeviceToHost) != cudaSuccess) exit(1);
        cudaFree(data);
        return;
    }
#endif
    (void)device;
    if (host) memcpy(host, data, bytes);
    free(data);
}

static void run(const moepool_store *store, int32_t device, float out[TOKENS][HIDDEN]) {
    /* Steps as a router would give them: two experts a token, or one and a place that is skipped. */
    static const int32_t ids[2][TOKENS][PLACES] = {{{0, 5}, {5, -1}, {2, 0}}, {{7, 1}, {1, 6}, {-1, -1}}};
    static float x[TOKENS][HIDDEN], weights[TOKENS][PLACES];
    moepool_pool_config config;
    moepool_pool_stats stats;
    moepool_pool *pool = NULL;
    void *device_x, *device_weights, *device_out;

    if (x[0][0] == 0) {
        fill(&x[0][0], TOKENS * HIDDEN);
        fill(&weights[0][0], TOKENS * PLACES);
    }
    moepool_pool_config_init(&config);
    config.slots = SLOTS;
    config.device = device;
    CHECK(moepool_pool_create(store, &config, &pool));
    device_x = allocate(device, sizeof x, x);
    device_weights = allocate(device, sizeof weights, weights);
    device_out = allocate(device, TOKENS * HIDDEN * sizeof(float), NULL);
    for (int step = 0; step < 2; ++step) {
        /* Ids may stay in host memory. In device memory the device would take the step by itself. */
        const moepool_ids given = {ids[step],      32, MOEPOOL_CPU, TOKENS, PLACES, PLACES * sizeof(int32_t),
                                   sizeof(int32_t)};
        const moepool_rows rows = {device_x, MOEPOOL_F32, 0};
        CHECK(moepool_pool_ffn(pool, &given, MOEPOOL_PHASE_AUTO, &rows, device_weights, MOEPOOL_F32, device_out, NULL));
    }
    take(device, device_out, out, TOKENS * HIDDEN * sizeof(float));
    take(device, device_x, NULL, 0);
    take(device, device_weights, NULL, 0);
    CHECK(moepool_pool_get_stats(pool, &stats));
    printf("device %d: %d slots, %lld misses, %lld evictions\n", (int)device, (int)stats.slots, (long long)stats.misses,
           (long long)stats.evictions);
    moepool_pool_destroy(pool);
}

int main(void) {
    static float on_cpu[TOKENS][HIDDEN], on_gpu[TOKENS][HIDDEN];
    moepool_store *store = make_store();
    int32_t devices = 0;

    run(store, MOEPOOL_CPU, on_cpu);
#ifndef CPU_ONLY
    if (moepool_cuda_devices(&devices) != MOEPOOL_OK) printf("no GPU: %s\n", moepool_last_error());
#endif
    run(store, devices > 0 ? 0 : MOEPOOL_CPU, on_gpu);
    moepool_store_destroy(store);
    printf("same bytes: %s\n", memcmp(on_cpu, on_gpu, sizeof on_cpu) == 0 ? "yes" : "no");
    return memcmp(on_cpu, on_gpu, sizeof on_cpu) != 0;
}
