// permute on CPU. One thread per token: results do not depend on the thread count. Row ids: see rows.py.
#include <vector>

#include "export.h"
#include "numbers.h"

namespace {

constexpr int64_t kBlock = 1024;  // columns whose sums fit the L1 cache
constexpr int64_t kRun = 256;  // terms of a row dot product summed in fp32

struct Rows {
    int32_t *pair, *order, *offsets;
    Rows(int32_t* ids, int64_t rows) : pair(ids), order(ids + rows), offsets(ids + 2 * rows) {}
};

// Calls visit(e) for a token's experts in order, testing eight 0/1 flags at a time.
template <typename Visit>
inline void each_expert(const uint8_t* flags, int64_t experts, Visit visit) {
    int64_t e = 0;
    for (; e + 8 <= experts; e += 8) {
        uint64_t word;
        std::memcpy(&word, flags + e, 8);
        for (; word; word &= word - 1) visit(e + (__builtin_ctzll(word) >> 3));
    }
    for (; e < experts; ++e)
        if (flags[e]) visit(e);
}

// Not inline: g++ 12 would vectorise over a token's rows, ten times slower.
template <typename T>
__attribute__((noinline)) void add_row(const T* x, float weight, float* sum, int64_t size) {
#pragma omp simd
    for (int64_t h = 0; h < size; ++h) sum[h] += weight * load(x + h);
}

// Sums in expert order, a piece of a row at a time.
template <typename T>
void gather(Guard&, const T* permuted, int32_t* row_ids, const float* probs, T* out, int64_t tokens,
            int64_t rows, int64_t width, int64_t stride, int threads) {
    const Rows ids(row_ids, rows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t start = 0; start < width; start += kBlock) {
            const int64_t size = std::min(kBlock, width - start);
            float sum[kBlock] = {};
            for (int32_t i = ids.offsets[t]; i < ids.offsets[t + 1]; ++i) {
                const int64_t row = ids.order[i];
                add_row(permuted + row * stride + start, probs ? probs[ids.pair[row]] : 1.0f, sum, size);
            }
            round_row(sum, size, out + t * width + start);
        }
    }
}

// Gradients of a row and, given the row, of its weight, for token gradient g.
template <typename T>
float backward_row(const T* g, const T* row, float weight, T* drow, int64_t width) {
    double total = 0;
    for (int64_t start = 0; start < width; start += kRun) {
        const int64_t end = std::min(start + kRun, width);
        if (row == nullptr) {
#pragma omp simd
            for (int64_t h = start; h < end; ++h) store(drow + h, weight * load(g + h));
            continue;
        }
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t h = start; h < end; ++h) {
            const float value = load(g + h);
            store(drow + h, weight * value);
            sum += value * load(row + h);
        }
        total += sum;
    }
    return static_cast<float>(total);
}

template <typename T>
void backward(Guard&, const T* dy, const T* permuted, int32_t* row_ids, const float* probs, T* dpermuted,
              float* dprobs, int64_t tokens, int64_t rows, int64_t width, int64_t dy_stride, int64_t stride,
              int threads) {
    const Rows ids(row_ids, rows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        for (int32_t i = ids.offsets[t]; i < ids.offsets[t + 1]; ++i) {
            const int64_t row = ids.order[i], pair = ids.pair[row];
            const T* x = permuted ? permuted + row * stride : nullptr;
            const float sum = backward_row(dy + t * dy_stride, x, probs[pair], dpermuted + row * width, width);
            if (permuted) dprobs[pair] = sum;
        }
    }
}

// The last offset is -1 if there are fewer routed pairs than rows.
void row_ids(Guard&, const uint8_t* map, int32_t* ids, int64_t tokens, int64_t experts, int64_t rows) {
    std::vector<int64_t> next(experts + 1);  // the next row of each expert
    for (int64_t t = 0; t < tokens; ++t) each_expert(map + t * experts, experts, [&](int64_t e) { ++next[e + 1]; });
    for (int64_t e = 0; e < experts; ++e) next[e + 1] += next[e];
    const Rows out(ids, rows);
    int64_t place = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        out.offsets[t] = static_cast<int32_t>(place);
        each_expert(map + t * experts, experts, [&](int64_t e) {
            const int64_t row = next[e]++;
            if (row >= rows) return;
            out.pair[row] = static_cast<int32_t>(t * experts + e);
            out.order[place++] = static_cast<int32_t>(row);
        });
    }
    out.offsets[tokens] = place == rows ? static_cast<int32_t>(rows) : -1;
}

void spread(Guard&, const char* x, int32_t* row_ids, char* out, int64_t tokens, int64_t rows, int64_t bytes,
            int64_t stride, int threads) {
    const Rows ids(row_ids, rows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
        for (int32_t i = ids.offsets[t]; i < ids.offsets[t + 1]; ++i)
            std::memcpy(out + ids.order[i] * bytes, x + t * stride, bytes);
}

}  // namespace

EXPORT(row_ids, row_ids);
EXPORT(spread, spread);
EXPORT_DTYPES(gather, gather);
EXPORT_DTYPES(backward, backward);
