// Memory for records: huge pages where the system has them, spread over the memory nodes that this process computes on.
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "cpu/threads.h"
#include "error.h"
#include "store/store.h"

namespace moepool {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Whether this process may run on a CPU of the node, whoever makes the store.
bool computes_on(int node) {
    std::ifstream list("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");  // "0-7,16-23"
    for (std::string part; std::getline(list, part, ',');) {
        int first, last;
        const int numbers = std::sscanf(part.c_str(), "%d-%d", &first, &last);
        if (numbers < 1) continue;
        for (int cpu = first; cpu <= (numbers == 2 ? last : first); ++cpu)
            if (process_may_use(cpu)) return true;
    }
    return false;
}

// Any thread may take any row group of an expert, so its pages go round the nodes: all of them answer at once. A policy
// that the user has set, by numactl for example, stays. Like huge pages a wish: without it results are the same.
void spread(void *memory, size_t bytes) {
    constexpr int kBits = 8 * sizeof(unsigned long);
    unsigned long allowed[16] = {}, nodes[16] = {};
    constexpr unsigned long kMost = sizeof allowed * 8;
    int policy = MPOL_DEFAULT, count = 0;
    if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) || policy != MPOL_DEFAULT) return;
    if (syscall(SYS_get_mempolicy, nullptr, allowed, kMost, nullptr, MPOL_F_MEMS_ALLOWED)) return;
    for (int node = 0; node < static_cast<int>(kMost); ++node) {
        if (!(allowed[node / kBits] >> (node % kBits) & 1) || !computes_on(node)) continue;
        nodes[node / kBits] |= 1ul << (node % kBits);
        ++count;
    }
    if (count > 1) syscall(SYS_mbind, memory, bytes, MPOL_INTERLEAVE, nodes, kMost + 1, 0);
}

}  // namespace

Pages::Pages(int64_t bytes) : bytes_(bytes) {
    // One huge page more, so that the first one can begin where such a page does; what is over goes back.
    const auto wanted = static_cast<size_t>(bytes);
    const size_t spare = wanted >= kHugePage ? kHugePage : 0;
    void *memory = mmap(nullptr, wanted + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail(MOEPOOL_ERROR_OUT_OF_MEMORY, "host memory: %lld bytes for packed experts were refused",
             static_cast<long long>(bytes));
    data_ = static_cast<uint8_t *>(memory);
    if (spare) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(memory) % kHugePage) % kHugePage;
        const size_t kept = (wanted + page - 1) / page * page;
        if (before) munmap(data_, before);
        data_ += before;
        if (const size_t behind = (wanted + spare + page - 1) / page * page - before - kept)
            munmap(data_ + kept, behind);
        madvise(data_, wanted, MADV_HUGEPAGE);
    }
    spread(data_, wanted);
}

Pages::~Pages() { munmap(data_, static_cast<size_t>(bytes_)); }

void Pages::forget(int64_t from, int64_t to) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    from = (from + page - 1) / page * page;
    to = to / page * page;
    if (from < to) madvise(data_ + from, static_cast<size_t>(to - from), MADV_DONTNEED);
}

}  // namespace moepool
