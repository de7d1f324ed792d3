// MOEPOOL_BOTH: of functions that the host and the device call.
#pragma once

#if defined(__CUDACC__)
#define MOEPOOL_BOTH __host__ __device__
#else
#define MOEPOOL_BOTH
#endif
