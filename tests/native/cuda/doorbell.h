// A doorbell at which nobody is: it keeps what a step asks for.
#pragma once

#include <cstdint>
#include <vector>

namespace moepool {
namespace cuda {

struct BellState {
    int share;                             // of the missing experts, drawn beforehand
    bool all_host;                         // the same
    std::vector<int> asked;                // by place: the expert, or -1
    bool trial;                            // whether the step before was one
    int streamed, copied, hosted, wanted;  // as the lesson gets them
    int offered, places, noted_places;     // the experts and places of which a share was asked for
};
struct Bell {
    BellState *state;
    bool divides;
};

}  // namespace cuda
}  // namespace moepool
