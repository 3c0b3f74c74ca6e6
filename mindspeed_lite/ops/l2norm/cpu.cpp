// Norms of fp32 tensors with the bits of PyTorch's, several tensors at a time.
//
// PyTorch adds the squares of a contiguous tensor as one chain of vector sums, element i into lane i modulo the vector's
// width, then the lanes in order, then what is left over one by one, then takes the root. One chain waits for itself: a
// core could add several in the same time, and PyTorch gives a tensor to one core. Here every thread goes through as many
// tensors side by side as there are SLOTS, each in its own order, so the bits are the same. Which vectors PyTorch has,
// and where it rounds square and sum together, depends on its build and the processor; cpu.py finds out by comparing.
#include <cmath>
#include <cstdint>

#include "guard.h"

namespace {

constexpr int64_t SLOTS = 2;
// Elements that a slot goes through before another has its turn: a few pages.
constexpr int64_t STRETCH = 4096;

template <bool fused>
inline float add_square(float sum, float x) {
    return fused ? std::fma(x, x, sum) : sum + x * x;
}

// `count` tensors, `n` elements of each, a multiple of `lanes`.
template <int lanes, bool fused, int count>
void add_squares(const float* const* x, int64_t n, float (*sums)[lanes]) {
    float totals[count][lanes];
    for (int k = 0; k < count; ++k)
        for (int lane = 0; lane < lanes; ++lane) totals[k][lane] = sums[k][lane];
    for (int64_t i = 0; i < n; i += lanes)
        for (int k = 0; k < count; ++k)
#pragma omp simd
            for (int lane = 0; lane < lanes; ++lane)
                totals[k][lane] = add_square<fused>(totals[k][lane], x[k][i + lane]);
    for (int k = 0; k < count; ++k)
        for (int lane = 0; lane < lanes; ++lane) sums[k][lane] = totals[k][lane];
}

template <int lanes>
float root(float* sums, const float* rest, int64_t left, bool fused) {
    float total = sums[0];
    for (int lane = 1; lane < lanes; ++lane) total = total + sums[lane];
    for (int64_t i = 0; i < left; ++i) total = fused ? add_square<true>(total, rest[i]) : add_square<false>(total, rest[i]);
    return std::sqrt(total);
}

template <int lanes, bool fused>
void norms(const float* const* tensors, const int64_t* sizes, float* out, int64_t count, bool fused_rest,
           int threads) {
    int64_t next = 0;
    const int64_t slots = count < SLOTS * threads ? 1 : SLOTS;  // no thread takes what another has no share of
#pragma omp parallel num_threads(threads)
    {
        const float* x[SLOTS];
        int64_t place[SLOTS], left[SLOTS];
        float sums[SLOTS][lanes];
        int64_t active = 0;
        bool more = true;
        while (true) {
            while (more && active < slots) {
                int64_t taken;
#pragma omp atomic capture
                taken = next++;
                if (!(more = taken < count)) break;
                x[active] = tensors[taken], place[active] = taken, left[active] = sizes[taken];
                for (int lane = 0; lane < lanes; ++lane) sums[active][lane] = 0.0f;
                ++active;
            }
            if (!active) break;
            int64_t n = STRETCH;
            for (int64_t k = 0; k < active; ++k) n = left[k] / lanes * lanes < n ? left[k] / lanes * lanes : n;
            (active == 1 ? add_squares<lanes, fused, 1> : add_squares<lanes, fused, SLOTS>)(x, n, sums);
            int64_t kept = 0;
            for (int64_t k = 0; k < active; ++k) {
                x[k] += n, left[k] -= n;
                if (left[k] < lanes) {
                    out[place[k]] = root<lanes>(sums[k], x[k], left[k], fused_rest);
                    continue;
                }
                if (kept != k) {
                    x[kept] = x[k], place[kept] = place[k], left[kept] = left[k];
                    for (int lane = 0; lane < lanes; ++lane) sums[kept][lane] = sums[k][lane];
                }
                ++kept;
            }
            active = kept;
        }
    }
}

}  // namespace

// lanes: 4, 8 or 16. fused, fused_rest: whether a square is added unrounded, in vectors and after them.
extern "C" int32_t l2norms(const float* const* tensors, const int64_t* sizes, float* out, int64_t count, int lanes,
                           int fused, int fused_rest, int threads) {
    return guarded([&](Guard&) {
        const auto run = lanes == 16 ? (fused ? norms<16, true> : norms<16, false>)
                         : lanes == 8 ? (fused ? norms<8, true> : norms<8, false>)
                                      : (fused ? norms<4, true> : norms<4, false>);
        run(tensors, sizes, out, count, fused_rest, threads);
    });
}
