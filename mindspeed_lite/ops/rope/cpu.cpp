// rope on CPU: one pass over x with any strides but the last. A token's factors are four contiguous rows of at most
// PAIRS:
// y1 = x1 * cos1 - x2 * sin1,  y2 = x2 * cos2 + x1 * sin2
// The transposed rotation reads other rows: y1 = x1 * cos1 + x2 * sin2, y2 = x2 * cos2 - x1 * sin1.
#include "export.h"
#include "numbers.h"

constexpr int64_t PAIRS = 256;

template <bool IN, bool OUT, class T>
static inline void turn(const T* x, T* y, const float* cos1, const float* sin1, const float* cos2, const float* sin2,
                        int64_t pairs, int64_t half) {
#pragma omp simd
    for (int64_t j = 0; j < pairs; ++j) {
        const float a = load(x + (IN ? 2 * j : j)), b = load(x + (IN ? 2 * j + 1 : j + half));
        store(y + (OUT ? 2 * j : j), a * cos1[j] - b * sin1[j]);
        store(y + (OUT ? 2 * j + 1 : j + half), b * cos2[j] + a * sin2[j]);
    }
}

template <class T>
static void rotate(Guard&, const T* x, const float* cos, const float* sin, const int64_t* positions, T* y, int64_t s,
                   int64_t b, int64_t n, int64_t d, int64_t width, int64_t start, int64_t rows, int64_t stride_s,
                   int64_t stride_b, int64_t stride_n, int64_t row, int64_t batch, float scale, int in, int out,
                   int transposed, int threads) {
    const int64_t half = width / 2, after = start + width;
    // The table is interleaved if x and y both are.
    const int64_t step = in && out ? 2 : 1, second = in && out ? 1 : half;
    const auto turned = in ? (out ? turn<true, true, T> : turn<true, false, T>)
                           : (out ? turn<false, true, T> : turn<false, false, T>);
#pragma omp parallel for num_threads(threads)
    for (int64_t token = 0; token < s * b; ++token) {
        const int64_t at = token / b, sequence = token % b;
        const int64_t position = positions ? positions[at] : at;
        const bool known = position >= 0 && position < rows;
        const float* c = cos + (known ? position * row + sequence * batch : 0);
        const float* z = sin + (c - cos);
        const float factor = known ? scale : std::numeric_limits<float>::quiet_NaN();
        const T* from = x + at * stride_s + sequence * stride_b;
        T* to = y + token * n * d;
        for (int64_t first = 0; first < half; first += PAIRS) {
            const int64_t pairs = std::min(PAIRS, half - first);
            float cos1[PAIRS], sin1[PAIRS], cos2[PAIRS], sin2[PAIRS];
            for (int64_t j = 0; j < pairs; ++j) {
                const int64_t one = (first + j) * step, two = one + second;
                const float z1 = z[one] * factor, z2 = z[two] * factor;
                cos1[j] = c[one] * factor;
                cos2[j] = c[two] * factor;
                sin1[j] = transposed ? -z2 : z1;
                sin2[j] = transposed ? -z1 : z2;
            }
            const int64_t in_x = start + (in ? 2 * first : first), in_y = start + (out ? 2 * first : first);
            for (int64_t head = 0; head < n; ++head) {
                turned(from + head * stride_n + in_x, to + head * d + in_y, cos1, sin1, cos2, sin2, pairs, half);
            }
        }
        if (width == d) continue;
        for (int64_t head = 0; head < n; ++head) {
            const T* rest = from + head * stride_n;
            std::memcpy(to + head * d, rest, start * sizeof(T));
            std::memcpy(to + head * d + after, rest + after, (d - after) * sizeof(T));
        }
    }
}

EXPORT_DTYPES(rope, rotate);
