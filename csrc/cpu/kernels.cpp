#include "cpu/kernels.h"

#include <atomic>
#include <cstring>

#include "error.h"

namespace moepool {

namespace {

const KernelSet *const sets[] = {
    &kPortableKernels,
#if defined(__x86_64__)
    &kEmulatedAmxKernels, &kAvx2Kernels, &kAvxVnniKernels, &kAvx512Kernels, &kAmxKernels,
#endif
};

const KernelSet *best() {
    for (int i = kernel_set_count() - 1; i > 0; --i)
        if (!sets[i]->lacks()) return sets[i];
    return sets[0];
}

std::atomic<const KernelSet *> selected{nullptr};

}  // namespace

int kernel_set_count() { return static_cast<int>(sizeof sets / sizeof *sets); }

const KernelSet &kernel_set(int index) { return *sets[index]; }

const KernelSet &kernels() {
    const KernelSet *set = selected.load(std::memory_order_acquire);
    if (!set) {
        set = best();
        selected.store(set, std::memory_order_release);
    }
    return *set;
}

void select_kernels(const char *name) {
    if (!name) {
        selected.store(best(), std::memory_order_release);
        return;
    }
    for (const KernelSet *set : sets) {
        if (std::strcmp(set->name, name)) continue;
        if (const char *why = set->lacks()) fail(MOEPOOL_ERROR_UNSUPPORTED, "kernel set \"%s\": %s", name, why);
        selected.store(set, std::memory_order_release);
        return;
    }
    fail(MOEPOOL_ERROR_ARGUMENT, "kernel set \"%s\" is not in this build", name);
}

}  // namespace moepool
