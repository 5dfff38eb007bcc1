// The experts that a token uses, from the router's logits, as tpi/kernels/mixture.py defines them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpi {

struct RouterSettings {
    size_t experts, used;
    bool sigmoid;     // scores of each expert by itself, rather than a softmax over all
    bool normalised;  // the weights of the chosen experts are divided by their sum
    float scale;
    size_t groups, groups_used, group_best;
};

// One token: `logits` become scores, `ranked` is [experts] of scratch; `bias` and `choice` are [experts] or null.
void choose_experts(const RouterSettings& settings, const float* bias, const float* choice, float* logits, float* ranked,
                    int32_t* experts, float* weights);

float sigmoid(float x);

}  // namespace tpi
