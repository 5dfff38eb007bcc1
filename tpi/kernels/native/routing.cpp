#include "routing.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace tpi {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void softmax(float* values, size_t count) {
    float most = *std::max_element(values, values + count), sum = 0.0f;
    for (size_t i = 0; i < count; ++i) sum += values[i] = std::exp(values[i] - most);
    for (size_t i = 0; i < count; ++i) values[i] /= sum;
}

// The index of the largest value; the first if there are several.
size_t best(const float* values, size_t count) {
    return static_cast<size_t>(std::max_element(values, values + count) - values);
}

float worth(const float* ranked, size_t size, size_t counted, std::vector<float>& sorted) {
    sorted.assign(ranked, ranked + size);
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    float sum = 0.0f;
    for (size_t i = 0; i < counted; ++i) sum += sorted[i];
    return sum;
}

// Exclude the experts of all but the best groups.
void close_groups(const RouterSettings& settings, RouterMemory& memory) {
    if (settings.groups == settings.groups_used) return;
    size_t size = settings.experts / settings.groups;
    float *ranked = memory.ranked.data(), *worths = memory.worths.data();
    for (size_t g = 0; g < settings.groups; ++g)
        worths[g] = worth(ranked + g * size, size, settings.group_best, memory.sorted);
    std::fill(memory.open.begin(), memory.open.end(), false);
    for (size_t i = 0; i < settings.groups_used; ++i) {
        size_t g = best(worths, settings.groups);
        memory.open[g] = true;
        worths[g] = kNever;
    }
    for (size_t e = 0; e < settings.experts; ++e)
        if (!memory.open[e / size]) ranked[e] = kNever;
}

}  // namespace

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void RouterMemory::fit(const RouterSettings& settings) {
    ranked.resize(settings.experts);
    sorted.reserve(settings.experts);
    worths.resize(settings.groups);
    open.resize(settings.groups);
}

void choose_experts(const RouterSettings& settings, const float* bias, const float* choice, float* logits,
                    RouterMemory& memory, int32_t* experts, float* weights) {
    size_t count = settings.experts;
    float* ranked = memory.ranked.data();
    for (size_t e = 0; bias && e < count; ++e) logits[e] += bias[e];
    if (settings.sigmoid) std::transform(logits, logits + count, logits, sigmoid);
    else softmax(logits, count);
    for (size_t e = 0; e < count; ++e) ranked[e] = logits[e] + (choice ? choice[e] : 0.0f);
    close_groups(settings, memory);
    float sum = 0.0f;
    for (size_t i = 0; i < settings.used; ++i) {
        size_t e = best(ranked, count);
        ranked[e] = kNever;
        experts[i] = static_cast<int32_t>(e);
        sum += weights[i] = logits[e];
    }
    for (size_t i = 0; i < settings.used; ++i)
        weights[i] = (settings.normalised ? weights[i] / sum : weights[i]) * settings.scale;
}

}  // namespace tpi
