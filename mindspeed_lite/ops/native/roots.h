// Square roots with PyTorch's bits, which are MKL's if built with MKL.
//
// MKL's are within 1 ulp, not always nearest, and depend on the processor; on non-Intel processors they are slow. If
// one of our methods has the same bits for every mantissa (checked in milliseconds), it replaces MKL. Needs
// -ffp-contract=off: contraction changes the bits.
#pragma once

#include "numbers.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

// Weak: MKL may be missing.
extern "C" __attribute__((weak)) void vmsSqrt(int, const float*, float*, long long);
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int);

namespace square_roots {

// Batch size, small enough to stay in L1.
constexpr int64_t MOST = 128;

// Computes roots; false if some may differ from MKL's.
using Way = bool (*)(int64_t, const float*, float*);

inline void by_mkl(int64_t n, const float* numbers, float* roots) {
    // MKL modes as PyTorch sets them.
    constexpr long long ACCURATE = 0x2, IGNORE_ERRORS = 0x100, KEEP_SUBNORMAL = 0x140000;
    // Callers are already parallel. MKL would wake threads for a few hundred values, up to milliseconds on busy cores.
    const int before = MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0;
    vmsSqrt(static_cast<int>(n), numbers, roots, ACCURATE | KEEP_SUBNORMAL | IGNORE_ERRORS);
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before);
}

inline bool nearest(int64_t n, const float* numbers, float* roots) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) roots[i] = std::sqrt(numbers[i]);
    return true;
}

#ifdef __AVX__
constexpr int64_t LANES = 8;

// sqrt(x) from rsqrt: one coupled Newton step for s = sqrt(x) and h = 1 / (2 sqrt(x)), then the residual x - s s in one
// float, times h.
inline __m256 newton_root(__m256 x) {
    const __m256 half = _mm256_set1_ps(0.5f);
    const __m256 approximate = _mm256_rsqrt_ps(x);
    const __m256 s = _mm256_mul_ps(x, approximate), h = _mm256_mul_ps(half, approximate);
    const __m256 wrong = _mm256_sub_ps(half, _mm256_mul_ps(s, h));
    const __m256 root = _mm256_add_ps(s, _mm256_mul_ps(s, wrong)), slope = _mm256_add_ps(h, _mm256_mul_ps(h, wrong));
    const __m256 rest = _mm256_sub_ps(x, _mm256_mul_ps(root, root));
    return _mm256_add_ps(root, _mm256_mul_ps(rest, slope));
}

// False unless every value is 0 or within 2^-96 and 2^96, where all products above are normal.
inline bool newton(int64_t n, const float* numbers, float* roots) {
    const __m256 least = _mm256_set1_ps(0x1p-96f), most = _mm256_set1_ps(0x1p96f), zero = _mm256_setzero_ps();
    __m256 plain = _mm256_cmp_ps(zero, zero, _CMP_EQ_OQ);
    alignas(32) float last[LANES];
    for (int64_t i = 0; i < n; i += LANES) {
        const bool whole = n - i >= LANES;
        if (!whole) {
            std::fill_n(last, LANES, 1.0f);
            std::copy(numbers + i, numbers + n, last);
        }
        const __m256 x = _mm256_loadu_ps(whole ? numbers + i : last);
        const __m256 within = _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_GE_OQ), _mm256_cmp_ps(x, most, _CMP_LE_OQ));
        const __m256 nothing = _mm256_cmp_ps(x, zero, _CMP_EQ_OQ);
        plain = _mm256_and_ps(plain, _mm256_or_ps(within, nothing));
        _mm256_storeu_ps(whole ? roots + i : last, _mm256_blendv_ps(newton_root(x), x, nothing));
        if (!whole) std::copy(last, last + (n - i), roots + i);
    }
    return _mm256_movemask_ps(plain) == 0xff;
}
#endif

// Whether `way` has MKL's bits for all values from 1 to 4; others differ in exponent only.
inline bool has_mkls_bits(Way way) {
    float numbers[MOST], ours[MOST], theirs[MOST];
    for (uint32_t first = as_bits(1.0f); first < as_bits(4.0f); first += MOST) {
        for (uint32_t k = 0; k < MOST; ++k) numbers[k] = as_float(first + k);
        by_mkl(MOST, numbers, theirs);
        if (!way(MOST, numbers, ours) || std::memcmp(ours, theirs, sizeof ours) != 0) return false;
    }
    return true;
}

// The method with PyTorch's bits here; null for MKL.
inline Way find() {
    if (!vmsSqrt || has_mkls_bits(nearest)) return nearest;
#ifdef __AVX__
    if (has_mkls_bits(newton)) return newton;
#endif
    return nullptr;
}

inline void take(int64_t n, const float* numbers, float* roots) {
    static const Way way = find();
    if (!way || !way(n, numbers, roots)) by_mkl(n, numbers, roots);
}

}  // namespace square_roots
