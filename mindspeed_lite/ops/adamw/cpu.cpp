// AdamW over a table of tensors: every number is read once and written once.
#include <vector>

#include "halves.h"
#include "numbers.h"

namespace {

// How the parameters stand in memory: as fp32 alone, with a bf16 copy in `out`, or in two halves, of which `out` is the
// bf16 one and `param` the other.
enum class Form : int { alone, copied, halves };

struct Entry {
    void* param;
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

template <class Grad, Form form, bool adds_l2>
void update(const Entry& entry, int64_t start, const Rule rule) {
    const int64_t n = std::min(PIECE, entry.size - start);
    float* __restrict param = static_cast<float*>(entry.param) + (form == Form::halves ? 0 : start);
    uint16_t* __restrict low = static_cast<uint16_t*>(entry.param) + (form == Form::halves ? start : 0);
    const Grad* __restrict grad = static_cast<const Grad*>(entry.grad) + start;
    float* __restrict exp_avg = entry.exp_avg + start;
    float* __restrict exp_avg_sq = entry.exp_avg_sq + start;
    bf16* __restrict out = form == Form::alone ? nullptr : entry.out + start;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        float g = load(grad + i) * rule.scale;
        const float squares = form == Form::halves ? std::fabs(exp_avg_sq[i]) : exp_avg_sq[i];
        float p = form == Form::halves ? join({out[i].bits, low[i], as_bits(exp_avg_sq[i]) >> 31}) : param[i];
        if (adds_l2) {
            g = g + rule.l2 * p;
        } else {
            p = p * rule.keep;
        }
        const float m = exp_avg[i] + rule.beta1_rest * (g - exp_avg[i]);
        const float v = rule.beta2 * squares + rule.beta2_rest * g * g;
        p = p - rule.rate * (m / (std::sqrt(v) / rule.root + rule.eps));
        exp_avg[i] = m;
        if (form == Form::halves) {
            const Halves halves = split(p);
            out[i].bits = static_cast<uint16_t>(halves.high);
            low[i] = static_cast<uint16_t>(halves.low);
            exp_avg_sq[i] = as_float((as_bits(v) & 0x7fffffffu) | halves.bit << 31);
        } else {
            exp_avg_sq[i] = v;
            param[i] = p;
            if (form == Form::copied) store(out + i, p);
        }
    }
}

template <class Grad, Form form>
void step(const Entry* table, int64_t count, const Rule rule, bool adds_l2, int threads) {
    std::vector<Piece> pieces;
    for (int64_t entry = 0; entry < count; ++entry)
        for (int64_t start = 0; start < table[entry].size; start += PIECE) pieces.push_back({entry, start});
    const int64_t total = static_cast<int64_t>(pieces.size());
    const auto run = adds_l2 ? update<Grad, form, true> : update<Grad, form, false>;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < total; ++i) run(table[pieces[i].entry], pieces[i].start, rule);
}

template <class Grad>
void step(const Entry* table, int64_t count, const Rule rule, Form form, bool adds_l2, int threads) {
    if (form == Form::alone) step<Grad, Form::alone>(table, count, rule, adds_l2, threads);
    if (form == Form::copied) step<Grad, Form::copied>(table, count, rule, adds_l2, threads);
    if (form == Form::halves) step<Grad, Form::halves>(table, count, rule, adds_l2, threads);
}

}  // namespace

// table: rows of six 64-bit words: addresses of param (of its low half), grad, exp_avg, exp_avg_sq and out (of the high
// half; unused where parameters stand alone), and the number of elements.
extern "C" void adamw(const Entry* table, int64_t count, int narrow_grads, int form, int adds_l2, float scale,
                      float keep, float l2, float beta1_rest, float beta2, float beta2_rest, float rate, float root,
                      float eps, int threads) {
    const Rule rule{scale, keep, l2, beta1_rest, beta2, beta2_rest, rate, root, eps};
    if (narrow_grads)
        step<bf16>(table, count, rule, static_cast<Form>(form), adds_l2, threads);
    else
        step<float>(table, count, rule, static_cast<Form>(form), adds_l2, threads);
}
