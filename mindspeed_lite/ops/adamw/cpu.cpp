// AdamW over a table of tensors in one pass over memory.
#include <vector>

#include "export.h"
#include "halves.h"
#include "numbers.h"
#include "roots.h"

namespace {

// Parameters: fp32; fp32 with a bf16 copy in `out`; or split, high half (bf16) in `out` and low half in `param`.
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

// Small enough to balance threads, many pages long.
constexpr int64_t PIECE = 1 << 15;

// a * b + c, rounded as in PyTorch's CPU kernels.
inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
}

// Updates a piece. Same operations and roundings as torch.optim.AdamW, so the same bits.
template <class Grad, Form form, bool adds_l2>
void update(const Entry& entry, int64_t start, const Rule rule) {
    const int64_t n = std::min(PIECE, entry.size - start);
    float *__restrict exp_avg = entry.exp_avg + start, *__restrict exp_avg_sq = entry.exp_avg_sq + start;
    float* __restrict param = static_cast<float*>(entry.param) + (form == Form::halves ? 0 : start);
    uint16_t* __restrict low = static_cast<uint16_t*>(entry.param) + (form == Form::halves ? start : 0);
    const Grad* __restrict grad = static_cast<const Grad*>(entry.grad) + start;
    bf16* __restrict out = form == Form::alone ? nullptr : entry.out + start;
    const auto present = [&](int64_t i) {
        return form == Form::halves ? join({out[i].bits, low[i], as_bits(exp_avg_sq[i]) >> 31}) : param[i];
    };
    float squares[square_roots::MOST], roots[square_roots::MOST];
    for (int64_t first = 0; first < n; first += square_roots::MOST) {
        const int64_t count = std::min(square_roots::MOST, n - first);
#pragma omp simd
        for (int64_t k = 0; k < count; ++k) {
            const int64_t i = first + k;
            float g = load(grad + i) * rule.scale;
            if (adds_l2) g = multiply_add(rule.l2, present(i), g);
            const float v = form == Form::halves ? std::fabs(exp_avg_sq[i]) : exp_avg_sq[i];
            exp_avg[i] = multiply_add(rule.beta1_rest, g - exp_avg[i], exp_avg[i]);
            squares[k] = multiply_add(rule.beta2_rest * g, g, rule.beta2 * v);
        }
        square_roots::take(count, squares, roots);
#pragma omp simd
        for (int64_t k = 0; k < count; ++k) {
            const int64_t i = first + k;
            float p = present(i);
            if (!adds_l2) p = p * rule.keep;
            p = p + -rule.rate * exp_avg[i] / (roots[k] / rule.root + rule.eps);
            if (form == Form::halves) {
                const Halves halves = split(p);
                out[i].bits = static_cast<uint16_t>(halves.high);
                low[i] = static_cast<uint16_t>(halves.low);
                exp_avg_sq[i] = as_float((as_bits(squares[k]) & 0x7fffffffu) | halves.bit << 31);
            } else {
                exp_avg_sq[i] = squares[k];
                param[i] = p;
                if (form == Form::copied) store(out + i, p);
            }
        }
    }
}

// table: rows of six 64-bit words: addresses of param (or low half), grad, exp_avg, exp_avg_sq, out (or high half;
// unused for fp32 alone), and the element count.
template <class Grad, Form form>
void step(Guard&, const Entry* table, int64_t count, int adds_l2, float scale, float keep,
          float l2, float beta1_rest, float beta2, float beta2_rest, float rate, float root, float eps, int threads) {
    const Rule rule{scale, keep, l2, beta1_rest, beta2, beta2_rest, rate, root, eps};
    std::vector<Piece> pieces;
    for (int64_t entry = 0; entry < count; ++entry)
        for (int64_t start = 0; start < table[entry].size; start += PIECE) pieces.push_back({entry, start});
    const int64_t total = static_cast<int64_t>(pieces.size());
    const auto run = adds_l2 ? update<Grad, form, true> : update<Grad, form, false>;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < total; ++i)
        run(table[pieces[i].entry], pieces[i].start, rule);
}

}  // namespace

EXPORT(alone_bf16, step<bf16, Form::alone>);
EXPORT(alone_fp32, step<float, Form::alone>);
EXPORT(copied_bf16, step<bf16, Form::copied>);
EXPORT(copied_fp32, step<float, Form::copied>);
EXPORT(halves_bf16, step<bf16, Form::halves>);
EXPORT(halves_fp32, step<float, Form::halves>);
