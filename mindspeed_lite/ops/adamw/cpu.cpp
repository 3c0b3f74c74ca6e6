// AdamW over a table of tensors: every number is read once and written once.
#include <vector>

#include "numbers.h"

namespace {

struct Entry {
    float* param;
    const void* grad;
    float* exp_avg;
    float* exp_avg_sq;
    bf16* out;
    int64_t size;
};

struct Rule {
    float scale, keep, l2, beta1_rest, beta2, beta2_rest, rate, root, eps;
};

struct Piece {
    int64_t entry, start;
};

// Small enough to share work evenly, long enough that a piece is many pages.
constexpr int64_t PIECE = 1 << 15;

template <class Grad, bool copies, bool adds_l2>
void update(const Entry& entry, int64_t start, const Rule rule) {
    const int64_t n = std::min(PIECE, entry.size - start);
    float* __restrict param = entry.param + start;
    const Grad* __restrict grad = static_cast<const Grad*>(entry.grad) + start;
    float* __restrict exp_avg = entry.exp_avg + start;
    float* __restrict exp_avg_sq = entry.exp_avg_sq + start;
    bf16* __restrict out = copies ? entry.out + start : nullptr;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        float g = load(grad + i) * rule.scale;
        float p = param[i];
        if (adds_l2) {
            g = g + rule.l2 * p;
        } else {
            p = p * rule.keep;
        }
        const float m = exp_avg[i] + rule.beta1_rest * (g - exp_avg[i]);
        const float v = rule.beta2 * exp_avg_sq[i] + rule.beta2_rest * g * g;
        p = p - rule.rate * (m / (std::sqrt(v) / rule.root + rule.eps));
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        param[i] = p;
        if (copies) store(out + i, p);
    }
}

template <class Grad>
void step(const Entry* table, int64_t count, const Rule rule, bool copies, bool adds_l2, int threads) {
    std::vector<Piece> pieces;
    for (int64_t entry = 0; entry < count; ++entry)
        for (int64_t start = 0; start < table[entry].size; start += PIECE) pieces.push_back({entry, start});
    const int64_t total = static_cast<int64_t>(pieces.size());
    const auto run = copies ? (adds_l2 ? update<Grad, true, true> : update<Grad, true, false>)
                            : (adds_l2 ? update<Grad, false, true> : update<Grad, false, false>);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < total; ++i) run(table[pieces[i].entry], pieces[i].start, rule);
}

}  // namespace

// table: rows of six 64-bit words: addresses of param, grad, exp_avg, exp_avg_sq and out (unused without `copies`),
// and the number of elements.
extern "C" void adamw(const Entry* table, int64_t count, int narrow_grads, int copies, int adds_l2, float scale,
                      float keep, float l2, float beta1_rest, float beta2, float beta2_rest, float rate, float root,
                      float eps, int threads) {
    const Rule rule{scale, keep, l2, beta1_rest, beta2, beta2_rest, rate, root, eps};
    if (narrow_grads)
        step<bf16>(table, count, rule, copies, adds_l2, threads);
    else
        step<float>(table, count, rule, copies, adds_l2, threads);
}
