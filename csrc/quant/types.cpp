#include "quant/types.h"

namespace moepool {

namespace {
constexpr const TypeInfo *table[] = {
#define X(T) &T::info,
    MOEPOOL_QUANT_TYPES(X)
#undef X
};
}  // namespace

const TypeInfo &type_info(int index) { return *table[index]; }

int find_type(int id) {
    for (int i = 0; i < kTypeCount; ++i)
        if (table[i]->id == id) return i;
    return -1;
}

}  // namespace moepool
