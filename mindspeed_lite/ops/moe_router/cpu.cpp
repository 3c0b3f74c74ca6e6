// moe_router on the CPU: a row at a time, scores to outputs and gradients to gradients.
//
// Ties are chosen as in PyTorch. Without ties at the limit the highest are taken one by one; otherwise torch.topk's CPU
// algorithms from the standard library run on the same sequence.
#include <utility>
#include <vector>

#include "export.h"
#include "numbers.h"

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK = 16;

inline int64_t padded(int64_t size) { return (size + BLOCK - 1) / BLOCK * BLOCK; }

// ---- the choice ----

using Ranked = std::pair<float, int32_t>;

// torch.topk's order: NaN first.
inline bool before(const Ranked& a, const Ranked& b) {
    return (a.first != a.first && b.first == b.first) || a.first > b.first;
}

struct Desk {
    std::vector<float> raw, key, worth, taken, probs;  // scores; padded keys; of groups; of the chosen; padded
    std::vector<Ranked> queue;
    std::vector<int32_t> chosen;
    std::vector<char> open;

    Desk(int64_t experts, int64_t topk, int64_t groups)
        : raw(experts),
          key(padded(experts)),
          worth(groups),
          taken(topk),
          probs(padded(topk)),
          queue(experts),
          chosen(topk),
          open(groups) {}
};

// torch.topk of key, for any contents; always sorted, which costs little.
void choose_as_torch(const float* key, int64_t size, int64_t k, std::vector<Ranked>& queue, int32_t* chosen) {
    for (int64_t i = 0; i < size; ++i) queue[i] = {key[i], static_cast<int32_t>(i)};
    const auto first = queue.begin(), end = first + size;
    if (k * 64 <= size) {
        std::partial_sort(first, first + k, end, before);
    } else {
        std::nth_element(first, first + k - 1, end, before);
        std::sort(first, first + k - 1, before);
    }
    for (int64_t i = 0; i < k; ++i) chosen[i] = queue[i].second;
}

inline float highest(const float* x, int64_t n) {
    float top = LOWEST;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
    return top;
}

// The k highest of key, which has no NaN, if they are all above the rest.
bool choose_if_clear(Desk& desk, int64_t k) {
    float *key = desk.key.data(), *taken = desk.taken.data();
    const int32_t size = static_cast<int32_t>(desk.key.size());
    int64_t count = 0;
    for (; count < k; ++count) {
        const float top = highest(key, size);
        if (top == LOWEST) break;
        int32_t place = size;
#pragma omp simd reduction(min : place)
        for (int32_t i = 0; i < size; ++i) place = key[i] == top ? std::min(place, i) : place;
        desk.chosen[count] = place;
        taken[count] = top;
        key[place] = LOWEST;
    }
    if (count == k && highest(key, size) < taken[k - 1]) return true;
    while (count--) key[desk.chosen[count]] = taken[count];
    return false;
}

// Sets the keys of all but the best groups to LOWEST.
//
// `coarse`: group scores are rounded to 16 bit, as torch.sum does.
void close_groups(Desk& desk, int64_t experts, int64_t groups, int64_t chosen, int64_t best, bool coarse, bool nan) {
    const int64_t size = experts / groups;
    for (int64_t g = 0; g < groups; ++g) {
        const float* key = desk.key.data() + g * size;
        float first = LOWEST, second = LOWEST;
        if (nan) {
            for (int64_t i = 0; i < size; ++i) {
                if (key[i] != key[i]) first = second = key[i];  // NaN stays: it sorts first
                if (key[i] > first) second = first, first = key[i];
                else if (key[i] > second) second = key[i];
            }
        } else {
            first = highest(key, size);
            if (best == 2) {
                int64_t equal = 0;
#pragma omp simd reduction(max : second) reduction(+ : equal)
                for (int64_t i = 0; i < size; ++i) {
                    const float below = key[i] == first ? LOWEST : key[i];
                    equal += key[i] == first;
                    second = below > second ? below : second;
                }
                if (equal > 1) second = first;
            }
        }
        const float worth = best == 2 ? first + second : first;
        desk.worth[g] = coarse ? as_float(rounded(worth) << 16) : worth;
        nan = nan || desk.worth[g] != desk.worth[g];  // inf - inf
    }
    // Groups with fewer than `chosen` better ones; more than `chosen` in case of ties.
    int64_t open = 0;
    for (int64_t g = 0; g < groups; ++g) {
        int64_t better = 0;
        for (int64_t other = 0; other < groups; ++other) better += desk.worth[other] > desk.worth[g];
        desk.open[g] = better < chosen;
        open += better < chosen;
    }
    if (nan || open != chosen) {
        std::vector<int32_t> picked(chosen);
        choose_as_torch(desk.worth.data(), groups, chosen, desk.queue, picked.data());
        std::fill(desk.open.begin(), desk.open.end(), 0);
        for (const int32_t g : picked) desk.open[g] = 1;
    }
    for (int64_t g = 0; g < groups; ++g) {
        if (!desk.open[g]) std::fill_n(desk.key.begin() + g * size, size, LOWEST);
    }
}

struct Form {
    int64_t experts, topk, groups, group_topk, best;  // groups: 0 for none
    bool coarse;
};

void choose(Desk& desk, const float* bias, const Form& form) {
    const int64_t experts = form.experts;
    const float* raw = desk.raw.data();
    float* key = desk.key.data();
    if (bias == nullptr) {
        std::copy_n(raw, experts, key);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < experts; ++i) key[i] = raw[i] + bias[i];
    }
    int nan = 0;
#pragma omp simd reduction(| : nan)
    for (int64_t i = 0; i < experts; ++i) nan |= key[i] != key[i];
    std::fill(desk.key.begin() + experts, desk.key.end(), LOWEST);
    if (form.groups != 0) close_groups(desk, experts, form.groups, form.group_topk, form.best, form.coarse, nan);
    if (!nan && choose_if_clear(desk, form.topk)) return;
    choose_as_torch(key, experts, form.topk, desk.queue, desk.chosen.data());
}

// ---- probabilities ----

enum Kind { SOFTMAX = 1, AS_THEY_ARE, SIGMOID, SQRTSOFTPLUS };  // as in cpu.py

constexpr float EPS = 1e-20f;

inline float sum_of(const float* x, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    return sum;
}

inline void softmax(float* x, int64_t n) {
    const float top = highest(x, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = exp_(x[i] - top);
    const float scale = 1.0f / sum_of(x, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

// Derivative by the logit, from the score.
inline float slope(int kind, float s) {
    if (kind == SIGMOID) return s * (1.0f - s);
    // s = sqrt(u), u = log(1 + e^x): e^x / (1 + e^x) = 1 - e^-u, as a series where it cancels.
    const float u = s * s;
    const float near = u * (1.0f - u * (0.5f - u * (1.0f / 6.0f - u * (1.0f / 24.0f - u * (1.0f / 120.0f)))));
    const float share = u < 0.125f ? near : 1.0f - exp_(-u);
    return s > 0.0f ? share / (2.0f * s) : (s == s ? 0.0f : s);
}

template <class In, class Out>
void forward(Guard& guard, int kind, const In* scores, int64_t stride, const float* bias, Out* probs, bool* map,
             int64_t* indices, float* kept, int64_t rows, int64_t experts, int64_t topk, int64_t groups,
             int64_t group_topk, int64_t best, float scale, int threads) {
    const Form form{experts, topk, groups, group_topk, best, sizeof(In) == 2};
    // Padded to avoid remainder loops.
    const int64_t wide = padded(topk);
    const auto run = [&](int64_t row, Desk& desk) {
        std::vector<float>& chosen = desk.probs;
        const In* in = scores + row * stride;
        float* raw = desk.raw.data();
#pragma omp simd
        for (int64_t i = 0; i < experts; ++i) raw[i] = load(in + i);
        choose(desk, bias, form);
        bool* routed = map + row * experts;
        std::memset(routed, 0, experts);
        for (int64_t j = 0; j < topk; ++j) routed[desk.chosen[j]] = true;
        for (int64_t j = 0; j < topk; ++j) {
            indices[row * topk + j] = desk.chosen[j];
            chosen[j] = desk.raw[desk.chosen[j]];
        }
        std::fill(chosen.begin() + topk, chosen.end(), kind == SOFTMAX ? LOWEST : 0.0f);
        if (kind == SOFTMAX) softmax(chosen.data(), wide);
        if (kept != nullptr) std::copy_n(chosen.begin(), topk, kept + row * topk);
        if (kind >= SIGMOID) {
            const float sum = sum_of(chosen.data(), wide) + EPS;
            for (float& each : chosen) each /= sum;
        }
        Out* out = probs + row * experts;
        std::memset(static_cast<void*>(out), 0, experts * sizeof(Out));
        for (int64_t j = 0; j < topk; ++j) store(out + desk.chosen[j], chosen[j] * scale);
    };
    each_row(guard, rows, threads, [&] { return Desk(experts, topk, form.groups); }, run);
}

// ---- gradients ----

// Backward through the chosen scores; `kind` is the scores', normalised or not.
template <class T>
void backward(Guard& guard, int kind, const T* grad, int64_t stride, const int64_t* indices, const float* kept, T* out,
              int64_t rows, int64_t experts, int64_t topk, int normalised, float scale, int threads) {
    const auto run = [&](int64_t row, std::vector<float>& g) {
        const int64_t* at = indices + row * topk;
        const float* s = kept + row * topk;
        T* dx = out + row * experts;
        float dot = 0.0f, sum = 0.0f;
        for (int64_t j = 0; j < topk; ++j) {
            g[j] = load(grad + row * stride + at[j]) * scale;
            dot += g[j] * s[j];
            sum += s[j];
        }
        std::memset(static_cast<void*>(dx), 0, experts * sizeof(T));
        if (kind == SOFTMAX) {
            for (int64_t j = 0; j < topk; ++j) store(dx + at[j], s[j] * (g[j] - dot));
            return;
        }
        sum += EPS;
        for (int64_t j = 0; j < topk; ++j) {
            const float ds = normalised ? (g[j] - dot / sum) / sum : g[j];
            store(dx + at[j], ds * slope(kind, s[j]));
        }
    };
    each_row(guard, rows, threads, [&] { return std::vector<float>(topk); }, run);
}

// Backward through the softmax over all experts, recomputed.
template <class T>
void backward_all(Guard& guard, const T* logits, int64_t logits_stride, const T* grad, int64_t stride,
                  const int64_t* indices, T* out, int64_t rows, int64_t experts, int64_t topk, float scale,
                  int threads) {
    const auto run = [&](int64_t row, std::vector<float>& scratch) {
        float *const p = scratch.data(), *const g = p + experts;
        const T* in = logits + row * logits_stride;
        const int64_t* at = indices + row * topk;
#pragma omp simd
        for (int64_t i = 0; i < experts; ++i) p[i] = load(in + i);
        softmax(p, experts);
        std::fill_n(g, experts, 0.0f);
        float dot = 0.0f;
        for (int64_t j = 0; j < topk; ++j) {
            g[at[j]] = load(grad + row * stride + at[j]) * scale;
            dot += g[at[j]] * p[at[j]];
        }
        T* dx = out + row * experts;
#pragma omp simd
        for (int64_t i = 0; i < experts; ++i) store(dx + i, p[i] * (g[i] - dot));
    };
    each_row(guard, rows, threads, [&] { return std::vector<float>(2 * experts); }, run);
}

}  // namespace

EXPORT(forward_bf16_bf16, forward<bf16, bf16>);
EXPORT(forward_fp32_bf16, forward<float, bf16>);
EXPORT(forward_fp32_fp32, forward<float, float>);
EXPORT_DTYPES(backward, backward);
EXPORT_DTYPES(backward_all, backward_all);
