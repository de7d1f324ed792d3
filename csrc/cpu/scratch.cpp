#include "cpu/scratch.h"

#include <new>
#include <utility>
#include <vector>

namespace moepool {

namespace {

constexpr size_t kKeptLines = (size_t{256} << 20) / sizeof(CacheLine);  // a thread

struct Kept {
    size_t count;
    std::unique_ptr<CacheLine[]> lines;
};
thread_local std::vector<Kept> kept;  // the latest last

}  // namespace

ScratchBlock::ScratchBlock(size_t bytes) : count_((bytes + sizeof(CacheLine) - 1) / sizeof(CacheLine)) {
    if (count_ == 0) return;
    auto best = kept.end();
    for (auto one = kept.begin(); one != kept.end(); ++one)
        if (one->count >= count_ && (best == kept.end() || one->count < best->count)) best = one;
    if (best == kept.end()) {
        lines_.reset(new CacheLine[count_]);
    } else {
        count_ = best->count;
        lines_ = std::move(best->lines);
        kept.erase(best);
    }
}

ScratchBlock::~ScratchBlock() {
    if (!lines_ || count_ > kKeptLines) return;
    size_t total = count_;
    for (const Kept &one : kept) total += one.count;
    for (; total > kKeptLines; kept.erase(kept.begin())) total -= kept.front().count;
    try {
        kept.push_back({count_, std::move(lines_)});
    } catch (const std::bad_alloc &) {
    }
}

}  // namespace moepool
