// GGUF rows to panels and back (quant/types.h says what a panel row holds).
#pragma once

#include <cstdint>

#include "quant/types.h"

namespace moepool {

// Bytes of a panel of `columns` columns, and of a row group: 32 rows over all chunks of `columns`.
int64_t panel_bytes(const TypeInfo &type, int64_t columns);
int64_t row_group_bytes(const TypeInfo &type, int64_t columns);

// Packs up to 32 rows of GGUF blocks (contiguous) into their row group. The panels' other rows stay as they are: zero.
// Returns the first of the rows with a float16 scale that is not finite, or -1.
int pack_row_group(int type_index, int64_t columns, int rows, const uint8_t *blocks, uint8_t *group);

// The inverse.
void unpack_row_group(int type_index, int64_t columns, int rows, const uint8_t *group, uint8_t *blocks);

}  // namespace moepool
