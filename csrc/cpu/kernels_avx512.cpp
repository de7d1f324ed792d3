// AVX-512 with VNNI: sixteen rows a register, two a panel plane; vpdpbusd takes four columns of each.
#if defined(__x86_64__)

// gcc 12 warns of its own intrinsics, which leave a register undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "cpu/kernels_impl.h"

namespace moepool {

namespace {

#include "cpu/lanes16.h"

}  // namespace

const KernelSet kAvx512Kernels = make_kernel_set<Avx512>("avx512", no_avx512);

}  // namespace moepool

#endif
