// How the decode kernels divide their blocks (cuda/decode_config.h), for devices with less shared memory than those at
// hand: every usual layer fits, and its blocks are whole.
#include "cuda/decode_config.h"

#include "check.h"

using namespace moepool;
using namespace moepool::cuda;

namespace {

struct Shape {
    int64_t hidden, width, k;
};
// Qwen3-30B-A3B, Mixtral 8x7B, gpt-oss, DeepSeek-V3, Qwen3-235B-A22B, OLMoE, and small ones.
constexpr Shape kShapes[] = {{2048, 768, 8},  {4096, 14336, 2}, {2880, 2880, 4}, {7168, 2048, 8},
                             {4096, 1536, 8}, {2048, 1024, 8},  {256, 32, 1},    {512, 96, 16}};
// Dynamic shared memory of a block on 7.5, on 8.6, 8.9 and 12.0, on 8.0, and on 9.0 and 10.0.
constexpr int kRooms[] = {56 << 10, 91 << 10, 155 << 10, 219 << 10};

void whole(const DecodeConfig &c, int most_warps, int room, const char *type, const char *what, const Shape &s) {
    if (c.shared_bytes <= room && c.warps >= 1 && c.warps <= most_warps && c.stages >= 1 && c.rounds >= 1) return;
    std::fprintf(stderr, "%s %s of %lld, %lld, %lld: %d warps, %d stages, %d rounds, %d of %d bytes\n", type, what,
                 static_cast<long long>(s.hidden), static_cast<long long>(s.width), static_cast<long long>(s.k),
                 c.warps, c.stages, c.rounds, c.shared_bytes, room);
    std::_Exit(1);
}

template <class T>
int fits() {
    int layers = 0;
    for (const Shape &s : kShapes) {
        if (s.hidden % T::info.block || s.width % T::info.block) continue;
        ++layers;
        const Matrix gate{0, s.width, s.hidden, 0, 0, -1, -1}, down{0, s.hidden, s.width, 0, 0, -1, -1};
        for (const int room : kRooms) {
            whole(single_token::gate_up_config<T>(gate, room), single_token::kGateUpWarps, room, T::info.name,
                  "gate/up", s);
            whole(single_token::down_config<T>(down, s.k, room), single_token::kDownWarps, room, T::info.name, "down",
                  s);
            whole(tiles::gate_up_config<T>(gate, room), tiles::kGateUpWarps, room, T::info.name, "gate/up of tiles", s);
            whole(tiles::half_config<T>(gate, room), tiles::kDownWarps, room, T::info.name, "half of tiles", s);
            whole(tiles::down_config<T>(down, s.k, room), tiles::kDownWarps, room, T::info.name, "down of tiles", s);
        }
    }
    return layers;
}

}  // namespace

int main() {
    int layers = 0;
#define X(T) layers += fits<T>();
    MOEPOOL_QUANT_TYPES(X)
#undef X
    std::printf("%d layers\n", layers);
}
