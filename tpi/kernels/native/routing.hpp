// The experts that a token uses, from the router's logits, as tpi/kernels/mixture.py defines them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tpi {

struct RouterSettings {
    size_t experts, used;
    bool sigmoid;     // scores of each expert by itself, rather than a softmax over all
    bool normalised;  // the weights of the chosen experts are divided by their sum
    float scale;
    size_t groups, groups_used, group_best;
};

// Scratch of a choice, reused by the next one.
struct RouterMemory {
    std::vector<float> ranked, sorted, worths;
    std::vector<bool> open;

    // Allocate all that `choose_experts` needs.
    void fit(const RouterSettings& settings);
};

// One token: `logits` become scores; `bias` and `choice` are [experts] or null. `memory` fits the settings.
void choose_experts(const RouterSettings& settings, const float* bias, const float* choice, float* logits,
                    RouterMemory& memory, int32_t* experts, float* weights);

float sigmoid(float x);

}  // namespace tpi
