/* Uses moepool as a C program does: moepool.h and libmoepool.so, no Python. Weights and activations are chosen so that
 * every sum is exact in float32; the expected values are computed in integers. Exits with 1 at the first difference. */
#include <moepool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 4, ROWS = 40, COLUMNS = 288, BLOCKS = COLUMNS / 32, TOKENS = 3, PLACES = 3, F32 = 0, Q8_0 = 8 };
enum { Q8_0_BYTES = 34, WEIGHTS = EXPERTS * ROWS * COLUMNS, OUTPUTS = TOKENS * PLACES * ROWS };

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "line %d: %s: \"%s\"\n", __LINE__, #condition, moepool_last_error()); \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

static const int32_t ids[TOKENS][PLACES] = {{0, -1, 3}, {2, 2, -1}, {-1, -1, -1}};

static float f32_blocks[EXPERTS][ROWS][COLUMNS];
static uint8_t q8_0_blocks[EXPERTS][ROWS][BLOCKS][Q8_0_BYTES];
static float x[TOKENS][COLUMNS];
static float out[TOKENS][PLACES][ROWS], hot[TOKENS][PLACES][ROWS], cold[TOKENS][PLACES][ROWS], sum[TOKENS][ROWS];

static int code(int expert, int row, int column) { return (expert * 31 + row * 17 + column * 7) % 11 - 5; }

/* The first column of each block is 127, the largest magnitude: quantising the block keeps every value as it is. */
static int activation(int token, int column) { return column % 32 == 0 ? 127 : (token * 13 + column * 5) % 15 - 7; }

static void make_data(void) {
    for (int e = 0; e < EXPERTS; e++)
        for (int n = 0; n < ROWS; n++)
            for (int k = 0; k < COLUMNS; k++) {
                uint8_t *block = q8_0_blocks[e][n][k / 32];
                f32_blocks[e][n][k] = (float)code(e, n, k);
                block[0] = 0x00; /* 0.5 as a little-endian float16 */
                block[1] = 0x38;
                block[2 + k % 32] = (uint8_t)code(e, n, k);
            }
    for (int t = 0; t < TOKENS; t++)
        for (int k = 0; k < COLUMNS; k++) x[t][k] = (float)activation(t, k);
}

/* Row `row` of a place, times two: zero for a skipped one; matrix 1 has the same codes as matrix 0 at half the scale.
 */
static long expected_twice(int matrix, int token, int place, int row) {
    long dot = 0;
    if (ids[token][place] < 0) return 0;
    for (int k = 0; k < COLUMNS; k++) dot += (long)code(ids[token][place], row, k) * activation(token, k);
    return matrix == 0 ? 2 * dot : dot;
}

static void check_rows(int matrix) {
    const float zero = 0.0f;
    for (int t = 0; t < TOKENS; t++)
        for (int j = 0; j < PLACES; j++)
            for (int n = 0; n < ROWS; n++) {
                CHECK(out[t][j][n] * 2 == (float)expected_twice(matrix, t, j, n));
                if (ids[t][j] < 0) CHECK(memcmp(&out[t][j][n], &zero, sizeof zero) == 0); /* not -0 */
            }
}

static void poison(void *rows, size_t bytes) { memset(rows, 0xff, bytes); /* every float a NaN */ }

static moepool_store *make_store(void) {
    moepool_matrix matrices[2];
    moepool_layer_info info;
    moepool_store *store = NULL;
    int32_t layer = -1;

    memset(matrices, 0, sizeof matrices);
    for (int m = 0; m < 2; m++) {
        matrices[m].type = m == 0 ? F32 : Q8_0;
        matrices[m].rows = ROWS;
        matrices[m].columns = COLUMNS;
    }
    CHECK(moepool_store_create(&store) == MOEPOOL_OK);
    CHECK(moepool_store_add_layer(store, EXPERTS, 2, matrices, &layer) == MOEPOOL_OK);
    CHECK(layer == 0 && moepool_store_layers(store) == 1);
    CHECK(moepool_store_pack(store, 0, 0, 0, EXPERTS, f32_blocks, sizeof f32_blocks[0]) == MOEPOOL_OK);
    CHECK(moepool_store_pack(store, 0, 1, 0, EXPERTS, q8_0_blocks, sizeof q8_0_blocks[0]) == MOEPOOL_OK);
    for (int e = 0; e < EXPERTS; e++) {
        static float f32_back[ROWS][COLUMNS];
        static uint8_t q8_0_back[ROWS][BLOCKS][Q8_0_BYTES];
        CHECK(moepool_store_unpack(store, 0, 0, e, f32_back) == MOEPOOL_OK);
        CHECK(memcmp(f32_back, f32_blocks[e], sizeof f32_back) == 0);
        CHECK(moepool_store_unpack(store, 0, 1, e, q8_0_back) == MOEPOOL_OK);
        CHECK(memcmp(q8_0_back, q8_0_blocks[e], sizeof q8_0_back) == 0);
    }
    CHECK(moepool_store_seal(store) == MOEPOOL_OK);
    CHECK(moepool_store_layer(store, 0, &info) == MOEPOOL_OK);
    CHECK(info.experts == EXPERTS && info.matrices == 2 && info.record_bytes % 256 == 0);
    return store;
}

static moepool_ids view(const void *data, int bits, int64_t tokens, int64_t k) {
    moepool_ids view;
    view.data = data;
    view.bits = bits;
    view.device = MOEPOOL_CPU;
    view.tokens = tokens;
    view.k = k;
    view.place_stride = bits / 8;
    view.token_stride = k * view.place_stride;
    return view;
}

static void check_matmul(moepool_route *route) {
    moepool_rows rows;
    rows.data = x;
    rows.dtype = MOEPOOL_F32;
    rows.per_place = 0;
    for (int m = 0; m < 2; m++) {
        poison(out, sizeof out);
        CHECK(moepool_matmul_id(route, m, MOEPOOL_ALL, &rows, &out[0][0][0], NULL) == MOEPOOL_OK);
        check_rows(m);
        poison(hot, sizeof hot);
        poison(cold, sizeof cold);
        poison(out, sizeof out);
        CHECK(moepool_matmul_id(route, m, MOEPOOL_HOT, &rows, &hot[0][0][0], NULL) == MOEPOOL_OK);
        CHECK(moepool_matmul_id(route, m, MOEPOOL_COLD, &rows, &cold[0][0][0], NULL) == MOEPOOL_OK);
        CHECK(moepool_add(MOEPOOL_CPU, OUTPUTS, &hot[0][0][0], &cold[0][0][0], &out[0][0][0], NULL) == MOEPOOL_OK);
        check_rows(m);
    }
    CHECK(moepool_matmul_id(route, 2, MOEPOOL_ALL, &rows, &out[0][0][0], NULL) == MOEPOOL_ERROR_ARGUMENT);
}

static void check_combine(moepool_route *route) {
    static const float weights[TOKENS][PLACES] = {{2, 100, 1}, {1, -1, 100}, {100, 100, 100}};
    poison(sum, sizeof sum);
    CHECK(moepool_combine(route, ROWS, &out[0][0][0], weights, MOEPOOL_F32, &sum[0][0], NULL) == MOEPOOL_OK);
    for (int t = 0; t < TOKENS; t++)
        for (int n = 0; n < ROWS; n++) {
            float expected = 0;
            for (int j = 0; j < PLACES; j++)
                if (ids[t][j] >= 0) expected += weights[t][j] * out[t][j][n];
            CHECK(sum[t][n] == expected);
        }
}

static void check_bad_ids(moepool_pool *pool) {
    const int32_t narrow[2] = {0, EXPERTS};
    const int64_t wide[2] = {(int64_t)1 << 32, 0}; /* its low half is a legal id */
    moepool_route *const untouched = (moepool_route *)(void *)&ids;
    moepool_route *route = untouched;
    moepool_pool_stats before, after;
    moepool_ids bad = view(narrow, 32, 1, 2);

    CHECK(moepool_pool_get_stats(pool, &before) == MOEPOOL_OK);
    CHECK(moepool_pool_resolve(pool, &bad, MOEPOOL_PHASE_AUTO, NULL, &route) == MOEPOOL_ERROR_INDEX);
    CHECK(strstr(moepool_last_error(), "4") != NULL && route == untouched);
    bad = view(wide, 64, 1, 2);
    CHECK(moepool_pool_resolve(pool, &bad, MOEPOOL_PHASE_AUTO, NULL, &route) == MOEPOOL_ERROR_INDEX);
    CHECK(strstr(moepool_last_error(), "4294967296") != NULL && route == untouched);
    CHECK(moepool_pool_get_stats(pool, &after) == MOEPOOL_OK);
    CHECK(before.steps == after.steps && before.misses == after.misses && before.copied_bytes == after.copied_bytes);
}

/* A pool whose residents the caller changes, traces, saves and loads. */
static void check_changes(const moepool_store *store) {
    const moepool_admission chosen[] = {{3, 1}}, foreign[] = {{1, 0}};
    const int32_t ahead[] = {2, 0};
    const int32_t wanted[] = {3, 2};
    moepool_ids step = view(wanted, 32, 1, 2);
    moepool_pool_config config;
    moepool_pool *pool = NULL, *other = NULL;
    moepool_route *route = NULL;
    moepool_trace_counts counts;
    moepool_trace_arrays none;
    moepool_pool_stats stats;
    int64_t tick[2], admission_step[3], size = 0;
    int32_t tokens[2], k[2], phase[2], bypass[2], traced[2], expert[3], slot[3], evicted[3], expert_in[3], made = 0;
    moepool_trace_arrays arrays;
    char state[1024];

    moepool_pool_config_init(&config);
    CHECK(config.half_life == 256 && config.period == 256 && config.protected_percent == 75 && config.guard == 0);
    config.slots = 2;
    config.max_slots = 3;
    config.policy = MOEPOOL_POLICY_LFU;
    config.half_life = 0;
    CHECK(moepool_pool_create(store, &config, &pool) == MOEPOOL_ERROR_ARGUMENT && pool == NULL);
    CHECK(strstr(moepool_last_error(), "half_life is 0") != NULL);
    config.half_life = 8;
    CHECK(moepool_pool_create(store, &config, &pool) == MOEPOOL_OK);
    CHECK(moepool_pool_create(store, &config, &other) == MOEPOOL_OK);

    CHECK(moepool_pool_trace_start(pool, 0) == MOEPOOL_OK);
    CHECK(moepool_pool_prefetch(pool, ahead, 2, &made) == MOEPOOL_OK && made == 2);
    CHECK(moepool_pool_resolve_chosen(pool, &step, MOEPOOL_PHASE_DECODE, foreign, 1, NULL, &route) ==
          MOEPOOL_ERROR_ARGUMENT);
    CHECK(moepool_pool_resolve_chosen(pool, &step, MOEPOOL_PHASE_DECODE, chosen, 1, NULL, &route) == MOEPOOL_OK);
    moepool_route_release(route);
    CHECK(moepool_pool_tables(pool, NULL, expert_in) == MOEPOOL_OK && expert_in[0] == 2 && expert_in[1] == 3);

    CHECK(moepool_pool_trace_stop(pool) == MOEPOOL_OK);
    CHECK(moepool_pool_trace_fetch(pool, &counts) == MOEPOOL_OK);
    CHECK(counts.steps == 2 && counts.places == 2 && counts.admissions == 3);
    memset(&none, 0, sizeof none);
    CHECK(moepool_pool_trace_take(pool, &counts, &none) == MOEPOOL_ERROR_ARGUMENT);
    arrays.tick = tick;
    arrays.tokens = tokens;
    arrays.k = k;
    arrays.phase = phase;
    arrays.bypass = bypass;
    arrays.ids = traced;
    arrays.admission_step = admission_step;
    arrays.expert = expert;
    arrays.slot = slot;
    arrays.evicted = evicted;
    CHECK(moepool_pool_trace_take(pool, &counts, &arrays) == MOEPOOL_OK);
    CHECK(phase[0] == MOEPOOL_TRACE_PREFETCH && phase[1] == MOEPOOL_TRACE_DECODE && tick[0] == 0 && tick[1] == 1);
    CHECK(tokens[0] == 0 && tokens[1] == 1 && k[1] == 2 && bypass[1] == 0 && traced[0] == 3 && traced[1] == 2);
    CHECK(admission_step[1] == 0 && admission_step[2] == 1 && expert[2] == 3 && slot[2] == 1 && evicted[2] == 0);
    CHECK(moepool_pool_trace_take(pool, &counts, &arrays) == MOEPOOL_ERROR_STATE);

    CHECK(moepool_pool_save(pool, NULL, 0, &size) == MOEPOOL_OK && size > 0 && size <= (int64_t)sizeof state);
    CHECK(moepool_pool_save(pool, state, size, &size) == MOEPOOL_OK);
    CHECK(moepool_pool_load(other, state, size - 1) == MOEPOOL_ERROR_IO);
    CHECK(moepool_pool_load(other, state, size) == MOEPOOL_OK);
    CHECK(moepool_pool_tables(other, NULL, expert_in) == MOEPOOL_OK && expert_in[0] == 2 && expert_in[1] == 3);

    CHECK(moepool_pool_resize(other, 4, &made) == MOEPOOL_ERROR_ARGUMENT);
    CHECK(moepool_pool_resize(other, 3, &made) == MOEPOOL_OK && made == 3);
    CHECK(moepool_pool_resize(other, 1, NULL) == MOEPOOL_OK);
    CHECK(moepool_pool_get_stats(other, &stats) == MOEPOOL_OK && stats.slots == 1 && stats.resident == 1);
    moepool_pool_destroy(pool);
    moepool_pool_destroy(other);
}

int main(void) {
    moepool_pool_config config;
    moepool_route_info info;
    moepool_pool *pool = NULL;
    moepool_route *route = NULL;
    moepool_ids wanted = view(ids, 32, TOKENS, PLACES);
    moepool_store *store;

    CHECK(moepool_abi_version() == MOEPOOL_ABI_VERSION);
    make_data();
    store = make_store();
    moepool_pool_config_init(&config);
    config.slots = EXPERTS - 1;
    CHECK(moepool_pool_create(store, &config, &pool) == MOEPOOL_OK);
    check_changes(store);
    moepool_store_destroy(store); /* the pool keeps its memory alive */

    CHECK(moepool_pool_resolve(pool, &wanted, MOEPOOL_PHASE_AUTO, NULL, &route) == MOEPOOL_OK);
    CHECK(moepool_route_get_info(route, &info) == MOEPOOL_OK);
    CHECK(info.tokens == TOKENS && info.k == PLACES && info.misses == 3 && info.hits == 0 && info.admitted == 3);
    check_matmul(route);
    check_combine(route);
    check_bad_ids(pool);
    check_matmul(route); /* a refused call leaves the pool as it was */

    moepool_pool_destroy(pool); /* before its route: any order will do */
    moepool_route_release(route);
    moepool_store_destroy(NULL);
    moepool_pool_destroy(NULL);
    moepool_route_release(NULL);
    puts("ok");
    return 0;
}
