#include "pool/route.h"

#include <algorithm>

#include "pool/pool.h"

namespace moepool {

Route::Route(std::shared_ptr<Pool> pool, std::vector<int32_t> ids, int64_t tokens, int64_t k)
    : pool_(std::move(pool)), ids_(std::move(ids)) {
    info.tokens = tokens;
    info.k = k;
    // A counting sort: a skipped place takes no position anywhere.
    std::vector<int64_t> first(static_cast<size_t>(pool_->layer().experts()) + 1, 0);
    for (const int32_t id : ids_)
        if (id >= 0) ++first[static_cast<size_t>(id) + 1];
    for (size_t e = 0; e + 1 < first.size(); ++e) {
        if (first[e + 1]) groups.push_back({static_cast<int>(e), -1, nullptr, first[e], first[e + 1]});
        first[e + 1] += first[e];
    }
    order_.resize(static_cast<size_t>(first.back()));
    for (size_t place = 0; place < ids_.size(); ++place)
        if (ids_[place] >= 0)
            order_[static_cast<size_t>(first[static_cast<size_t>(ids_[place])]++)] = static_cast<int32_t>(place);
}

Route::~Route() {
    device.reset();  // first: it orders later fills of the slots behind what still reads them
    pool_->release(*this);
}

std::vector<int> Route::wanted() const {
    std::vector<int> experts;
    for (const Group &group : groups) experts.push_back(group.expert);
    return experts;
}

void Route::tables(int32_t *hot, int32_t *cold) const {
    if (hot) std::fill_n(hot, places(), -1);
    if (cold) std::fill_n(cold, places(), -1);
    for (const Group &group : groups) {
        int32_t *table = group.slot >= 0 ? hot : cold;
        if (!table) continue;
        for (int64_t i = group.first; i < group.first + group.count; ++i)
            table[order_[static_cast<size_t>(i)]] = group.slot >= 0 ? group.slot : group.expert;
    }
}

}  // namespace moepool
