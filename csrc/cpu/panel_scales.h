// The scales of a panel's blocks, block after block. quant/decode.h says what they are, block by block, and the
// portable kernels take them so. Vectors of rows spend a third of a few activations' time on it, so here what the
// blocks of a panel share is decoded once: float16 scales, and small integers four to a word, a byte each.
#pragma once

#include "quant/decode.h"

namespace moepool {

template <class T, class L, bool kShared = (L::kLanes > 1)>
struct PanelScales {
    Panel<L> panel;
    MOEPOOL_INLINE explicit PanelScales(Panel<L> panel) : panel(panel) {}
    MOEPOOL_INLINE void operator()(int b, Scales<L> &s) const { Decode<T>::scales(panel, b, s); }
};

template <class L>
MOEPOOL_INLINE typename L::W byte_of(typename L::W w, int i) {
    return i == 3 ? w >> 24 : (w >> (8 * i)) & 0xffu;
}

// Q4_K and Q5_K: blocks 0 to 3, then 4 to 7.
template <class L>
struct SixBitScales {
    typename L::F d, m;
    typename L::W scales[2], minimums[2];
    MOEPOOL_INLINE explicit SixBitScales(Panel<L> p) : d(p.half(0, 0)), m(p.half(0, 1)) {
        const typename L::W first = p.word(1), second = p.word(2), third = p.word(3);
        scales[0] = first & 0x3f3f3f3fu;
        minimums[0] = second & 0x3f3f3f3fu;
        scales[1] = (third & 0x0f0f0f0fu) | ((first >> 2) & 0x30303030u);
        minimums[1] = ((third >> 4) & 0x0f0f0f0fu) | ((second >> 2) & 0x30303030u);
    }
    MOEPOOL_INLINE void operator()(int b, Scales<L> &s) const {
        s.c = d * L::to_float(byte_of<L>(scales[b / 4], b % 4));
        s.m = m * L::to_float(byte_of<L>(minimums[b / 4], b % 4));
    }
};
template <class L>
struct PanelScales<Q4_K, L, true> : SixBitScales<L> {
    using SixBitScales<L>::SixBitScales;
};
template <class L>
struct PanelScales<Q5_K, L, true> : SixBitScales<L> {
    using SixBitScales<L>::SixBitScales;
};

template <class L>
struct PanelScales<Q3_K, L, true> {
    typename L::F c;
    typename L::W scales[4];  // of blocks 0 and 1, 2 and 3, ...: two a block
    MOEPOOL_INLINE explicit PanelScales(Panel<L> p) : c(p.half(first_word<Q3_K, 3>(1), 0)) {
        const int first = first_word<Q3_K, 2>(1);
        const typename L::W high = p.word(first + 2);
        for (int g = 0; g < 4; ++g)
            scales[g] =
                ((p.word(first + g % 2) >> (4 * (g / 2))) & 0x0f0f0f0fu) | (((high >> (2 * g)) & 0x03030303u) << 4);
    }
    MOEPOOL_INLINE void operator()(int b, Scales<L> &s) const {
        s.c = c;
        s.s0 = byte_of<L>(scales[b / 2], 2 * (b % 2)) - 32u;
        s.s1 = byte_of<L>(scales[b / 2], 2 * (b % 2) + 1) - 32u;
    }
};

// Here only the float16 scales are shared.
template <class L>
struct PanelScales<Q2_K, L, true> {
    Panel<L> panel;
    typename L::F c, m;
    MOEPOOL_INLINE explicit PanelScales(Panel<L> p) : panel(p), c(p.half(0, 0)), m(p.half(0, 1)) {}
    MOEPOOL_INLINE void operator()(int b, Scales<L> &s) const {
        Decode<Q2_K>::scales(panel, b, s);
        s.c = c;
        s.m = m;
    }
};
template <class L>
struct PanelScales<Q6_K, L, true> {
    Panel<L> panel;
    typename L::F c;
    MOEPOOL_INLINE explicit PanelScales(Panel<L> p) : panel(p), c(p.half(first_word<Q6_K, 3>(1), 0)) {}
    MOEPOOL_INLINE void operator()(int b, Scales<L> &s) const {
        Decode<Q6_K>::scales(panel, b, s);
        s.c = c;
    }
};

// Those of kSide panels side by side, which `panel(i)` gives.
template <class T, class L, int kSide>
struct SideScales;
template <class T, class L>
struct SideScales<T, L, 1> {
    PanelScales<T, L> side[1];
    template <class Of>
    MOEPOOL_INLINE explicit SideScales(const Of &panel) : side{PanelScales<T, L>(panel(0))} {}
};
template <class T, class L>
struct SideScales<T, L, 2> {
    PanelScales<T, L> side[2];
    template <class Of>
    MOEPOOL_INLINE explicit SideScales(const Of &panel)
        : side{PanelScales<T, L>(panel(0)), PanelScales<T, L>(panel(1))} {}
};

}  // namespace moepool
