/* clang-format off: it folds the list below. */
/* moepool: mixture-of-experts weights packed in host memory, hot experts in slots on a device.
 *
 * This header is the whole C ABI. It is plain C99, includes nothing but <stdint.h> and <stddef.h>, and
 * is also what the Python binding is generated from, so it stays free of macros that expand to code.
 *
 * CONVENTIONS
 *   Errors.     Every function that can fail returns a moepool_status, and moepool_last_error() gives the message of
 *               this thread. Arguments are checked before anything is changed; output parameters are untouched on
 *               failure. A resolve whose copy to the device fails may have evicted experts: the pool stays consistent
 *               and usable.
 *   Handles.    moepool_store, moepool_pool and moepool_route are opaque and owned by the caller, who releases each
 *               once with its ..._destroy / ..._release function; NULL is accepted there and does nothing. A pool
 *               keeps its store's memory alive and a route its pool's, so handles may be released in any order.
 *   Threads.    Functions on different handles may run at once. A sealed store may be used by any number of threads.
 *               A pool may be used by any number of threads: resolve is serialised inside, kernels run in parallel.
 *               A route is used by one thread at a time.
 *   Devices.    MOEPOOL_CPU (-1) or a CUDA device index. Pointers to rows, weights and outputs are host pointers for
 *               the CPU and device pointers of that device otherwise. `stream` is a cudaStream_t (NULL: the default
 *               stream), ignored on the CPU. CPU calls return when the result is there; CUDA calls when it is queued:
 *               rows, weights, ids and outputs must live until the stream has passed the work. A route may be
 *               released at once.
 *   Arithmetic. docs/numerics.md. The bits of a result depend on weights, activations, ids and router weights alone.
 *
 * THE ID CONTRACT
 *   ids is (tokens, k): for each token (row) and place (column) the number of an expert of the layer.
 *   -1            the place is skipped: its output row is +0.0 in every column and it takes no part in combine.
 *   repeats       allowed, within a token and between tokens: every place is computed for itself.
 *   out of range  an id outside [-1, experts) on the host is MOEPOOL_ERROR_INDEX with its position; 64-bit ids are
 *                 compared before they are narrowed. In device memory it makes the place's row NaN and the pool's
 *                 next host call returns MOEPOOL_ERROR_INDEX; it is never used as an address.
 *   tokens = 0    legal: nothing is computed, nothing is counted. All ids -1 is legal: all rows are zero.
 */
/* clang-format on */
#ifndef MOEPOOL_H
#define MOEPOOL_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define MOEPOOL_API
#else
#define MOEPOOL_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------- status and version */

typedef enum moepool_status {
    MOEPOOL_OK = 0,
    MOEPOOL_ERROR_ARGUMENT = 1,      /* a value, shape or size is wrong */
    MOEPOOL_ERROR_INDEX = 2,         /* an expert id is outside [-1, experts) */
    MOEPOOL_ERROR_OUT_OF_MEMORY = 3, /* host or device memory; the message says how many bytes were asked for */
    MOEPOOL_ERROR_CUDA = 4,          /* the CUDA runtime or driver failed */
    MOEPOOL_ERROR_IO = 5,            /* data of a file is inconsistent (a weight scale that is not finite, ...) */
    MOEPOOL_ERROR_UNSUPPORTED = 6,   /* legal, but not in this build or on this machine */
    MOEPOOL_ERROR_STATE = 7,         /* the handle is not in a state that allows the call */
    MOEPOOL_ERROR_INTERNAL = 8,      /* a fault of moepool itself: please report it */
    MOEPOOL_ERROR_INTERRUPTED = 9    /* the caller wanted the call to end (moepool_set_interrupt) */
} moepool_status;

enum { MOEPOOL_ABI_VERSION = 2 };

/* The MOEPOOL_ABI_VERSION the library was built with. */
MOEPOOL_API int32_t moepool_abi_version(void);

/* Message of the last failed call of this thread, "" if none failed. Valid until this thread's next moepool call. */
MOEPOOL_API const char *moepool_last_error(void);

/* What was built, as a JSON object: version, compiler, flags, cuda (toolkit version or null), cuda_archs, cpu kernel
 * sets. Static storage. */
MOEPOOL_API const char *moepool_build_info(void);

/* ------------------------------------------------------------------------------------------------ quantisation types */

/* A ggml weight type that this build computes with. */
typedef struct moepool_type_info {
    int32_t id;          /* ggml's number */
    int32_t block;       /* columns of a block; K must be a multiple */
    int32_t block_bytes; /* bytes of a block in a GGUF file */
    int32_t panel_words; /* 32-bit words that a row takes in a full panel of 256 columns */
    const char *name;    /* ggml's name in lower case ("q4_k"); static storage */
} moepool_type_info;

MOEPOOL_API int32_t moepool_type_count(void);

/* The index-th type, 0 <= index < moepool_type_count(), in rising id. */
MOEPOOL_API moepool_status moepool_type_at(int32_t index, moepool_type_info *info);

/* --------------------------------------------------------------------------------------------------------- the CPU */

/* Kernel sets ("portable", "avx512", ...) in rising order of preference. All give the same bits. */
MOEPOOL_API int32_t moepool_cpu_kernel_count(void);
/* Name of the index-th set and whether this machine can run it. Static storage. */
MOEPOOL_API moepool_status moepool_cpu_kernel_at(int32_t index, const char **name, int32_t *usable);
/* Why this machine can not run the index-th set; NULL if it can, or if there is none. Static storage. */
MOEPOOL_API const char *moepool_cpu_kernel_lacks(int32_t index);
/* Picks a set by name for all later calls of the process; NULL picks the best usable one, which is the default. */
MOEPOOL_API moepool_status moepool_cpu_select(const char *name);
/* Name of the set in use. Static storage. */
MOEPOOL_API const char *moepool_cpu_selected(void);

/* Threads that later calls use, the caller included. 0 restores the default: MOEPOOL_THREADS and MOEPOOL_AFFINITY of
 * the environment, else the CPUs this process may use, by its cgroup limit and by the affinity of its main thread when
 * the library was loaded, or fewer if the system starts no more threads. MOEPOOL_ERROR_ARGUMENT if it starts fewer than
 * were asked for. Calls under way finish on the threads they began with. */
MOEPOOL_API moepool_status moepool_set_threads(int32_t threads);
/* The same, and thread i keeps to CPU cpus[i % count]. The caller is thread 0 and is left where it is; so is the thread
 * that answers devices (moepool_pool_ffn), the caller of what it computes, which runs on any CPU that the process might
 * use when the library was loaded. threads = 0: as many as there are CPUs in the list. count = 0: the system places
 * threads. The CPUs must be among those that the process might use when the library was loaded. */
MOEPOOL_API moepool_status moepool_set_threads_on(int32_t threads, const int32_t *cpus, int32_t count);
/* A moepool_status, negated, if the default is needed and the environment's makes no sense. */
MOEPOOL_API int32_t moepool_get_threads(void);

/* Lets the calling thread's long calls on the CPU be ended: check(data) is called by them, on this thread, some twenty
 * times a second. If it does not return 0 the call ends soon, with MOEPOOL_ERROR_INTERRUPTED: what it was to write is
 * unspecified, and pools, routes and stores are as after a call that succeeded; records that were being packed can be
 * packed again. It holds no lock of moepool meanwhile. NULL takes it back. Filling slots is not ended, nor what a CUDA
 * pool does. */
typedef int32_t (*moepool_interrupt)(void *data);
MOEPOOL_API void moepool_set_interrupt(moepool_interrupt check, void *data);

/* -------------------------------------------------------------------------------------------------------------- CUDA */

typedef struct moepool_device_info {
    char name[256];
    char pci_bus_id[32]; /* "0000:17:00.0" */
    char uuid[48];       /* "GPU-..." as NVML writes it */
    int32_t compute_major, compute_minor;
    int64_t total_bytes, free_bytes; /* as the CUDA runtime sees them */
} moepool_device_info;

/* How many CUDA devices this process sees: CUDA_VISIBLE_DEVICES decides. Fails with UNSUPPORTED and a reason where
 * there is no usable driver, or no CUDA in this build. */
MOEPOOL_API moepool_status moepool_cuda_devices(int32_t *count);
MOEPOOL_API moepool_status moepool_cuda_device(int32_t device, moepool_device_info *info);

/* The most host memory that this process page-locks for CUDA, over all stores; INT64_MAX, the default, is no limit.
 * Records past it stay pageable: they reach the device through a small page-locked ring. Applies to what is pinned
 * from now on; a layer is pinned when its first CUDA pool is made. */
MOEPOOL_API moepool_status moepool_set_pinned_limit(int64_t bytes);

/* How steps on a device ask the CPU for what it is to compute (moepool_pool_ffn). Of the process; holds for steps that
 * are launched or captured from then on, host_nodes for pools that have taken no step yet. */
typedef struct moepool_doorbell_settings {
    int64_t timeout_us; /* how long a step waits for an answer: 1,000,000. If the CPU answers none, a graph of many
                         * pools waits so long once, and then 10 ms a pool. A display's watchdog ends kernels after
                         * 2 s */
    int32_t host_nodes; /* 1: a host function of the stream or graph asks, and no kernel waits: slower by some 35 to
                         * 80 us a layer. 0: kernels wait. -1: they do where that is safe, which it is not under
                         * Windows */
    int32_t period;     /* with miss = auto, steps of a pool from one comparison with the CPU alone to the next: 2048.
                         * Below 0, for tests: also where the CPU has no prospect */
    int64_t stall_us;   /* for tests: the CPU waits so long before it computes; -1: its thread ends instead; 0 */
} moepool_doorbell_settings;
MOEPOOL_API moepool_status moepool_set_doorbell(const moepool_doorbell_settings *settings);
MOEPOOL_API void moepool_get_doorbell(moepool_doorbell_settings *settings);

/* For those who hand arrays of other libraries in. The device that a pointer's memory is on; MOEPOOL_CPU for memory of
 * the host, page-locked or not. */
MOEPOOL_API moepool_status moepool_cuda_pointer_device(const void *pointer, int32_t *device);
/* Whether a stream of a device records a graph. */
MOEPOOL_API moepool_status moepool_cuda_stream_capturing(int32_t device, void *stream, int32_t *capturing);
/* What `later` is given from here on waits for what `earlier` was given so far. Does nothing if one of the two records
 * a graph and the other does not: what is recorded runs when the graph is launched. */
MOEPOOL_API moepool_status moepool_cuda_stream_order(int32_t device, void *earlier, void *later);
/* Waits for all that a stream was given; not if it records a graph. */
MOEPOOL_API moepool_status moepool_cuda_stream_wait(int32_t device, void *stream);

/* --------------------------------------------------------------------------------------------------------- the store */

/* A store holds the packed experts of any number of layers. An expert's record is its matrices in the order of the
 * layer (for an FFN: gate, up, down), then its biases and scales. */
typedef struct moepool_store moepool_store;

/* One matrix of every expert of a layer: `rows` outputs (N) by `columns` inputs (K). */
typedef struct moepool_matrix {
    int32_t type; /* ggml's number */
    int32_t has_bias;
    int32_t has_scale;
    int64_t rows;
    int64_t columns;
} moepool_matrix;

typedef struct moepool_layer_info {
    int32_t experts;
    int32_t matrices;
    int64_t record_bytes; /* one expert; a multiple of 256; what one slot takes and one miss copies */
    int64_t bytes;        /* all records, with the padding between pieces */
    int64_t pinned_bytes; /* of these, page-locked for CUDA */
} moepool_layer_info;

MOEPOOL_API moepool_status moepool_store_create(moepool_store **store);
MOEPOOL_API void moepool_store_destroy(moepool_store *store);

/* Appends a layer of `experts` experts, each with `count` matrices, its memory zeroed, and gives its index. Types must
 * be known, sizes positive, columns whole blocks. */
MOEPOOL_API moepool_status moepool_store_add_layer(moepool_store *store, int32_t experts, int32_t count,
                                                   const moepool_matrix *matrices, int32_t *layer);

/* Packs the GGUF blocks of `count` experts from `expert` on, on all threads. Expert i of these begins at blocks + i *
 * expert_stride bytes, its rows follow one another. Refuses scales (float16) that are not finite with MOEPOOL_ERROR_IO
 * and leaves the records of the call in an unspecified, repackable state. */
MOEPOOL_API moepool_status moepool_store_pack(moepool_store *store, int32_t layer, int32_t matrix, int32_t expert,
                                              int32_t count, const void *blocks, int64_t expert_stride);

/* The inverse: writes the GGUF blocks of one expert, rows * columns / block * block_bytes bytes, the same bytes that
 * were packed. */
MOEPOOL_API moepool_status moepool_store_unpack(const moepool_store *store, int32_t layer, int32_t matrix,
                                                int32_t expert, void *blocks);

/* Sets one expert's bias (rows floats) or scale (one float) of a matrix declared with it. */
MOEPOOL_API moepool_status moepool_store_set_bias(moepool_store *store, int32_t layer, int32_t matrix, int32_t expert,
                                                  const float *bias);
MOEPOOL_API moepool_status moepool_store_set_scale(moepool_store *store, int32_t layer, int32_t matrix, int32_t expert,
                                                   const float *scale);

/* Ends packing: from here on the store cannot change and pools can be made. */
MOEPOOL_API moepool_status moepool_store_seal(moepool_store *store);

MOEPOOL_API int32_t moepool_store_layers(const moepool_store *store);
MOEPOOL_API moepool_status moepool_store_layer(const moepool_store *store, int32_t layer, moepool_layer_info *info);

/* --------------------------------------------------------------------------------------------------------- the pool */

/* A pool serves one layer of a store from `slots` slots on a device. */
typedef struct moepool_pool moepool_pool;

enum { MOEPOOL_CPU = -1 };

/* Which experts are resident: docs/design.md, the residency law. Integers, no clocks: the same calls give the same hits
 * on every device. */
typedef int32_t moepool_policy;
enum {
    MOEPOOL_POLICY_LRU = 0,    /* evicts the expert used longest ago */
    MOEPOOL_POLICY_STATIC = 1, /* holds the experts given at creation and no others, and admits nobody */
    MOEPOOL_POLICY_LFU = 2,    /* evicts the one used least often; counts are halved every half_life steps */
    MOEPOOL_POLICY_LFRU = 3,   /* the one used longest ago, where every use, halved likewise, is worth `weight` steps */
    MOEPOOL_POLICY_SLRU = 4,   /* LRU in two segments: a hit protects an expert, one that is not protected goes first */
    MOEPOOL_POLICY_REELECT = 5, /* every `period` steps the experts used most in it are elected; only they replace
                                 * others, and only others go. Before the first election LRU */
    MOEPOOL_POLICY_PINNED = 6   /* LRU, but the experts given at creation stay */
};

/* Who computes an expert that is wanted and not resident. Which experts become resident does not depend on it, but for
 * AUTO. No bit of a result does. */
typedef int32_t moepool_miss;
enum {
    MOEPOOL_MISS_STREAM = 0, /* the device: from the slot just filled, or, if it got none, read in place */
    MOEPOOL_MISS_HOST = 1,   /* the CPU, where the record lies; a slot it was given is filled for later steps */
    MOEPOOL_MISS_AUTO = 2    /* both, divided by measured rates so that they finish together. Of a step that the device
                              * takes, only records that the device reads are admitted, so that who becomes resident
                              * depends on the division there; a step that the host resolves is one of HOST */
};

typedef int32_t moepool_phase;
enum {
    MOEPOOL_PHASE_AUTO = 0, /* a prompt if it has more than prompt_tokens tokens */
    MOEPOOL_PHASE_DECODE = 1,
    MOEPOOL_PHASE_PROMPT = 2 /* bypasses: admits, evicts and counts nothing */
};

typedef struct moepool_pool_config {
    int32_t layer;
    int32_t slots;     /* 0 .. experts; more is capped at experts */
    int32_t max_slots; /* the most that moepool_pool_resize can ask for, capped likewise; 0: as many as are made */
    int32_t device;    /* MOEPOOL_CPU or a CUDA device */
    moepool_policy policy;
    moepool_miss miss;
    int32_t prompt_tokens; /* MOEPOOL_PHASE_AUTO takes more tokens than this for a prompt; 32 */
    int32_t admit; /* the most experts admitted a step; -1: no limit, with miss = auto 1 while not all have a slot */
    int64_t budget_bytes; /* on CUDA, the most that this pool's slots take; what does not fit gets no slot. 0: all pools
                           * of a device take at most half of the memory that they and nobody else use. With max_slots
                           * memory is taken in chunks of up to 32 MiB, the last of which may go past it. */
    int32_t hot_count;    /* STATIC, PINNED: the experts that stay, hottest first, distinct, at most `slots`; */
    const int32_t *hot;   /* STATIC: NULL are the first `slots` experts. Copied. */
    int32_t guard;        /* 1: a miss replaces an expert only if it was wanted more often, with counts that are halved
                           * every half_life steps. Not for STATIC and REELECT */
    int32_t half_life;    /* LFU, LFRU and guard: at least 1; 256 */
    int32_t weight;       /* LFRU: 0 .. 1048576; 16 */
    int32_t period;       /* REELECT: at least 1; 256 */
    int32_t protected_percent; /* SLRU: the most slots that are protected, 0 .. 100 percent; 75 */
} moepool_pool_config;

/* What a step of a trace was. */
typedef int32_t moepool_trace_phase;
enum {
    MOEPOOL_TRACE_DECODE = 0,
    MOEPOOL_TRACE_PROMPT = 1,
    MOEPOOL_TRACE_PREFETCH = 2 /* no step: moepool_pool_prefetch, with the tick of the step before it */
};

/* Counts since creation. An expert counts once a step, however many places want it. */
typedef struct moepool_pool_stats {
    int64_t steps;       /* resolves with at least one wanted expert */
    int64_t bypasses;    /* of these, steps that left the pool as it was */
    int64_t hits;        /* decode steps: wanted experts that were resident */
    int64_t misses;      /* decode steps: wanted experts that were not */
    int64_t prompt_hits; /* the same of prompt steps */
    int64_t prompt_misses;
    int64_t evictions;
    int64_t copied_bytes;   /* records copied into slots */
    int64_t in_place_bytes; /* records of stream misses read where they lie, once a step */
    int64_t host_bytes;     /* records that the CPU computed for a device, and of host misses, once a step */
    int64_t step_backs; /* with miss = auto: how often serving through slots lost against the CPU alone for long, and
                         * the pool left everything to the CPU for some thousand steps */
    int32_t slots;      /* fewer than asked for if memory was short */
    int32_t experts;
    int32_t resident;     /* slots that hold an expert now */
    int32_t leased;       /* slots that an open route pins now */
    int64_t slot_bytes;   /* device memory that the slots take */
    int64_t pinned_bytes; /* of the layer's records, page-locked */
    int64_t prefetched;   /* experts that moepool_pool_prefetch brought in */
} moepool_pool_stats;

/* Fills `config` with the defaults: layer 0, 0 slots, CPU, LRU, stream, 32, -1, no hot list, no guard, and the figures
 * said above. */
MOEPOOL_API void moepool_pool_config_init(moepool_pool_config *config);

MOEPOOL_API moepool_status moepool_pool_create(const moepool_store *store, const moepool_pool_config *config,
                                               moepool_pool **pool);
/* Not while a CUDA graph that holds steps of the pool may still be launched, or runs: its kernels use the pool's
 * memory. Destroy such graphs first. */
MOEPOOL_API void moepool_pool_destroy(moepool_pool *pool);
/* Of a pool that takes steps on its device this and moepool_pool_tables wait for the device. If a graph holds its
 * steps, MOEPOOL_ERROR_STATE while one of the device's streams is being captured: a capture on a stream that does not
 * block the default stream is lost by it. So do all calls below that need to know who is resident. */
MOEPOOL_API moepool_status moepool_pool_get_stats(const moepool_pool *pool, moepool_pool_stats *stats);

/* The remap tables: slot_of[experts] holds an expert's slot or -1 (hot), expert_in[slots] a slot's expert or -1. Both
 * have room for `experts`, since there may be as many slots by now; what is past the slots is not written. Either may
 * be NULL. */
MOEPOOL_API moepool_status moepool_pool_tables(const moepool_pool *pool, int32_t *slot_of, int32_t *expert_in);

/* Brings experts into slots ahead of the steps that want them. It is no step: no tick, no hit, no miss. `experts`, on
 * the host, are distinct ids; those that are missing take, in this order, the slots that the policy would give up
 * first, neither leased ones nor those of other experts named. If such slots run out, the rest stays out; a static pool
 * takes nobody. *admitted, unless NULL, is how many came in. */
MOEPOOL_API moepool_status moepool_pool_prefetch(moepool_pool *pool, const int32_t *experts, int32_t count,
                                                 int32_t *admitted);

/* Changes the number of slots while the pool is in use, to at most max_slots; more than experts is capped. The experts
 * worth most to the policy stay; STATIC and PINNED pools take their hot experts in again as slots for them come.
 * MOEPOOL_ERROR_STATE if an open route reads a slot that would go, or a stream of the device is being captured. CUDA
 * graphs that hold steps of the pool stay valid. *made, unless NULL, is how many slots there are: fewer than asked for
 * if memory is short. A pool made with max_slots gives memory back that its slots no longer take. */
MOEPOOL_API moepool_status moepool_pool_resize(moepool_pool *pool, int32_t slots, int32_t *made);

/* What a pool knows, for another one with the same policy, hot experts and number of slots, of a layer with as many
 * experts of the same types and sizes: the residents, and how often and when experts were wanted. Not its stats. Writes
 * *size bytes if `capacity` is enough, and always says how many. */
MOEPOOL_API moepool_status moepool_pool_save(const moepool_pool *pool, void *data, int64_t capacity, int64_t *size);
/* A pool that goes on where the saved one stopped: copies the residents' records into their slots.
 * MOEPOOL_ERROR_ARGUMENT if the bytes are not of such a pool, MOEPOOL_ERROR_IO if they are damaged, MOEPOOL_ERROR_STATE
 * while routes are open. */
MOEPOOL_API moepool_status moepool_pool_load(moepool_pool *pool, const void *data, int64_t size);

/* The trace: what every step wanted and whom it admitted. A place whose id was out of range in device memory is -2.
 * Steps that a device takes, in replays of a graph too, go to a ring of about room_bytes in its memory until they are
 * fetched; 0: 64 MiB. The host's memory bounds the others. Starting again forgets what was not taken. Changes of the
 * number of slots and states that are loaded are not in it: what was recorded across one of them is no run that can be
 * replayed. */
MOEPOOL_API moepool_status moepool_pool_trace_start(moepool_pool *pool, int64_t room_bytes);
/* What was recorded can still be taken. Does nothing if no trace was started. */
MOEPOOL_API moepool_status moepool_pool_trace_stop(moepool_pool *pool);

typedef struct moepool_trace_counts {
    int64_t steps, places, admissions;
} moepool_trace_counts;

/* How much there is to take. Waits for the device, as moepool_pool_get_stats does. MOEPOOL_ERROR_STATE, once, if the
 * ring had no room for some steps, which are then missing. */
MOEPOOL_API moepool_status moepool_pool_trace_fetch(moepool_pool *pool, moepool_trace_counts *counts);

/* Arrays of the caller, of the lengths that were counted; none may be NULL unless its length is 0. */
typedef struct moepool_trace_arrays {
    int64_t *tick;   /* of each step: the pool's step count */
    int32_t *tokens; /* ... the shape of its ids */
    int32_t *k;
    moepool_trace_phase *phase; /* ... or a prefetch, whose ids are none */
    int32_t *bypass;
    int32_t *ids;            /* of all steps, one after the other */
    int64_t *admission_step; /* of each admission: which of these steps, from 0 */
    int32_t *expert, *slot;
    int32_t *evicted; /* the expert that was in the slot, or -1 */
} moepool_trace_arrays;

/* Takes the first counts->steps steps; they are then forgotten. `counts` are those of the last fetch. */
MOEPOOL_API moepool_status moepool_pool_trace_take(moepool_pool *pool, const moepool_trace_counts *counts,
                                                   const moepool_trace_arrays *arrays);

/* --------------------------------------------------------------------------------------------------------- the route */

/* The outcome of resolving the ids of one step: where each place's expert is read. It is also a lease: a slot that it
 * uses is not overwritten before it is released. */
typedef struct moepool_route moepool_route;

typedef struct moepool_ids {
    const void *data;
    int32_t bits;   /* 32 or 64: signed integers */
    int32_t device; /* where data lies: MOEPOOL_CPU or a CUDA device */
    int64_t tokens;
    int64_t k;            /* at least 1 */
    int64_t token_stride; /* bytes from a token to the next; may be negative or 0 */
    int64_t place_stride; /* bytes from a place to the next */
} moepool_ids;

typedef struct moepool_route_info {
    int64_t tokens;
    int64_t k;
    int64_t tick;   /* the pool's step count, 0 if the step wanted nothing */
    int32_t bypass; /* the step left the pool as it was */
    int32_t prompt; /* it was a prompt step */
    int32_t hits;   /* distinct wanted experts that were resident */
    int32_t misses; /* ... that were not */
    int32_t admitted;
} moepool_route_info;

/* One step of the residency law: takes the distinct ids, decides who is admitted and evicted, fills slots. `ids` is
 * read before the call returns. */
MOEPOOL_API moepool_status moepool_pool_resolve(moepool_pool *pool, const moepool_ids *ids, moepool_phase phase,
                                                void *stream, moepool_route **route);

/* The same with admissions that the caller has chosen: `count` of them, each a missing expert that the step wants and a
 * slot for it, of which no open route reads and which holds no expert that the step wants, nor a pinned one. A step
 * that bypasses takes none, nor does a STATIC pool. So a policy of the caller's own is run, or a trace replayed. */
typedef struct moepool_admission {
    int32_t expert, slot;
} moepool_admission;
MOEPOOL_API moepool_status moepool_pool_resolve_chosen(moepool_pool *pool, const moepool_ids *ids, moepool_phase phase,
                                                       const moepool_admission *admissions, int32_t count, void *stream,
                                                       moepool_route **route);
MOEPOOL_API void moepool_route_release(moepool_route *route);
MOEPOOL_API moepool_status moepool_route_get_info(const moepool_route *route, moepool_route_info *info);

/* hot[tokens * k]: the slot that serves the place, or -1. cold[tokens * k]: the id of a place that no slot serves, or
 * -1. A skipped place is -1 in both. Host arrays; either may be NULL. */
MOEPOOL_API moepool_status moepool_route_tables(const moepool_route *route, int32_t *hot, int32_t *cold);

/* --------------------------------------------------------------------------------------------------------- the ops */

typedef int32_t moepool_dtype;
enum { MOEPOOL_F32 = 0, MOEPOOL_F16 = 1, MOEPOOL_BF16 = 2 };

/* Which places an op computes; the others' rows are +0.0. HOT and COLD partition the places that are not skipped, as
 * moepool_route_tables says. */
typedef int32_t moepool_half;
enum { MOEPOOL_ALL = 0, MOEPOOL_HOT = 1, MOEPOOL_COLD = 2 };

/* Activation rows, packed: (tokens, columns), or (tokens, k, columns) if per_place. */
typedef struct moepool_rows {
    const void *data;
    moepool_dtype dtype;
    int32_t per_place;
} moepool_rows;

/* out (tokens, k, rows) = the route's experts' matrix times x, float32, packed. out must not overlap x. */
MOEPOOL_API moepool_status moepool_matmul_id(const moepool_route *route, int32_t matrix, moepool_half half,
                                             const moepool_rows *x, float *out, void *stream);

/* The whole layer: gate, up, swiglu, down, combine. x is (tokens, columns of gate), or per place, weights (tokens, k),
 * out (tokens, rows of down) float32. The pool's layer must have three matrices (gate, up, down). The same bytes as the
 * ops one by one. out may not overlap x or weights. */
MOEPOOL_API moepool_status moepool_ffn(const moepool_route *route, const moepool_rows *x, const void *weights,
                                       moepool_dtype weights_dtype, float *out, void *stream);

/* moepool_pool_resolve, moepool_ffn and moepool_route_release in one: the same bytes, the same residency, the same
 * counts. out may not overlap x, weights or ids. On CUDA a decode step of up to 16 tokens and 512 places with ids in
 * device memory, packed, is taken by the device itself: no copy to the host, no synchronisation, and a CUDA graph can
 * hold it. That wants records that are all page-locked; any other step is resolved by the host, and is
 * MOEPOOL_ERROR_STATE while `stream` is being captured. Steps of one pool run in the order of their calls, and evict
 * nothing that a route uses which was open when they were called, or when a graph that holds them was launched. Replays
 * of a graph must be ordered with the other uses of its pools by the caller, and the pools must outlive the graph.
 *
 * What miss = host or auto leaves to the CPU, a thread of this process computes on the threads of moepool_set_threads,
 * while the device waits: the process must run for a replay to end. If it does not answer in time
 * (moepool_doorbell_settings), the rows of that step's places and of later ones are NaN, no later step of this pool
 * waits, other pools give up after 10 ms for as long as the CPU takes up no request, and the next call that uses the
 * pool fails with MOEPOOL_ERROR_STATE, as do all later steps of it. */
MOEPOOL_API moepool_status moepool_pool_ffn(moepool_pool *pool, const moepool_ids *ids, moepool_phase phase,
                                            const moepool_rows *x, const void *weights, moepool_dtype weights_dtype,
                                            float *out, void *stream);

/* Says in words who would take a step of this shape by moepool_pool_ffn with ids on the pool's device: the device, with
 * the launch geometry of its kernels, or the host, and why. Writes at most size - 1 characters and a final 0. */
MOEPOOL_API moepool_status moepool_pool_describe(moepool_pool *pool, int64_t tokens, int64_t k, char *text,
                                                 int64_t size);

/* out[i] = silu(gate[i]) * up[i], i < count. out may be gate or up. */
MOEPOOL_API moepool_status moepool_swiglu(int32_t device, int64_t count, const float *gate, const float *up, float *out,
                                          void *stream);

/* out[i] = a[i] + b[i]: joins zero-padded halves exactly. out may be a or b. */
MOEPOOL_API moepool_status moepool_add(int32_t device, int64_t count, const float *a, const float *b, float *out,
                                       void *stream);

/* out (tokens, columns) = sum over the places j of a token, in rising order and skipping ids of -1, of weights (tokens,
 * k) times rows (tokens, k, columns). */
MOEPOOL_API moepool_status moepool_combine(const moepool_route *route, int64_t columns, const float *rows,
                                           const void *weights, moepool_dtype weights_dtype, float *out, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* MOEPOOL_H */
