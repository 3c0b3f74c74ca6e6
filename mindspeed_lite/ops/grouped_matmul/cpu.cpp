// y = x times the weight of each row's expert, for bf16, by oneDNN's micro-kernels.
//
// A task is some panels of one expert's weight, packed into memory of the thread, which stays in the core's own cache
// while all rows of that expert meet it, BLOCK at a time. So a thread computes whole experts where there are many, and
// nobody waits for the others between two of them; a product of its own for each expert wakes all threads for it.
//
// Micro-kernels are made for a number of rows: the last block of an expert is a multiple of STEP rows and reads some
// that are not its own, whose results are left. Sums have the same order whatever the threads and the counts.
#include <memory>

#include "brgemm.h"

namespace {

constexpr int64_t BLOCK = 96, STEP = 8, DEPTH = 1024;
// Bytes of packed weight that a task may take, and at most so many panels.
constexpr int64_t SHARE = 512 * 1024, PANELS = 4;

int64_t ceiling(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Columns [0, width) of B [k, ...] from rows of the weight [width, k]: transposes pairs of numbers, in tiles.
void pack_transposed(const bf16* weight, int64_t ld, int64_t width, int64_t k, bf16* to) {
    constexpr int64_t side = 16;  // pairs; a row of a tile is a line of the cache
    static_assert(side == 1 << 4);
    alignas(64) uint32_t one[side * side], two[side * side];
    for (int64_t column = 0; column < width; column += side) {
        const int64_t columns = std::min(side, width - column);
        for (int64_t depth = 0; depth < k; depth += 2 * side) {
            for (int64_t i = 0; i < columns; ++i)
                std::memcpy(one + i * side, weight + (column + i) * ld + depth, side * sizeof(uint32_t));
            // Four times: the bits of the row have become those of the column.
            interleave<side * side>(one, two);
            interleave<side * side>(two, one);
            interleave<side * side>(one, two);
            interleave<side * side>(two, one);
            for (int64_t i = 0; i < side; ++i)
                std::memcpy(to + (depth + 2 * i) * width + 2 * column, one + i * side, columns * sizeof(uint32_t));
        }
    }
}

// Columns [0, width) of B [k, width] from the weight itself.
void pack_plain(const bf16* weight, int64_t ld, int64_t width, int64_t k, bf16* to) {
    for (int64_t row = 0; row < k; row += 2)
        pack_rows(weight + row * ld, weight + (row + 1) * ld, width, to + row * width);
}

void write(const float* c, int64_t rows, int64_t width, const bf16* bias, bf16* y, int64_t ld) {
    float added[PANEL] = {};
    if (bias)
        for (int64_t i = 0; i < width; ++i) added[i] = load(bias + i);
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = c + row * PANEL;
        bf16* to = y + row * ld;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) store(to + i, from[i] + added[i]);
    }
}

}  // namespace

// x [total, k] of any row stride, y [total, n] contiguous, counts [experts] that sum to total; weights[e] is [n, k], or
// [k, n] if not transposed, biases[e] [n] or biases null. k is a multiple of TILE.
static void grouped_matmul(const bf16* x, int64_t ld_x, const int64_t* counts, int64_t experts,
                           const bf16* const* weights, const bf16* const* biases, int32_t transposed, int64_t total,
                           int64_t n, int64_t k, bf16* y, int32_t threads, Guard& guard) {
    const int64_t panels = std::clamp<int64_t>(SHARE / (PANEL * k * static_cast<int64_t>(sizeof(bf16))), 1, PANELS);
    const int64_t parts = ceiling(n, panels * PANEL) / (panels * PANEL);
    const std::unique_ptr<int64_t[]> starts(new int64_t[experts + 1]);
    starts[0] = 0;
    for (int64_t expert = 0; expert < experts; ++expert) starts[expert + 1] = starts[expert] + counts[expert];
#pragma omp parallel num_threads(threads)
    {
        std::unique_ptr<bf16[]> packed, last;
        std::unique_ptr<float[]> c;
        guard([&] {
            packed.reset(new bf16[panels * PANEL * k]);
            last.reset(new bf16[BLOCK * k]);
            c.reset(new float[BLOCK * PANEL]);
        });
        const auto run = [&](int64_t task) {
            const int64_t expert = task / parts, left = task % parts * panels * PANEL;
            const int64_t right = std::min(n, left + panels * PANEL), begin = starts[expert], end = starts[expert + 1];
            if (begin == end) return;
            for (int64_t start = left; start < right; start += PANEL) {
                const int64_t width = std::min(PANEL, right - start);
                bf16* to = packed.get() + (start - left) * k;
                if (transposed)
                    pack_transposed(weights[expert] + start * k, k, width, k, to);
                else
                    pack_plain(weights[expert] + start, n, width, k, to);
            }
            for (int64_t row = begin; row < end; row += BLOCK) {
                const int64_t rows = std::min(BLOCK, end - row), met = ceiling(rows, STEP);
                const bf16* a = x + row * ld_x;
                int64_t ld_a = ld_x;
                if (row + met > total) {
                    for (int64_t i = 0; i < met; ++i)
                        if (i < rows)
                            std::memcpy(last.get() + i * k, a + i * ld_x, k * sizeof(bf16));
                        else
                            std::memset(static_cast<void*>(last.get() + i * k), 0, k * sizeof(bf16));
                    a = last.get();
                    ld_a = k;
                }
                for (int64_t start = left; start < right; start += PANEL) {
                    const int64_t width = std::min(PANEL, right - start);
                    const bf16* b = packed.get() + (start - left) * k;
                    for (int64_t top = 0; top < k; top += DEPTH)
                        multiply(met, width, std::min(DEPTH, k - top), a + top, ld_a, b + top * width, c.get(), PANEL,
                                 top > 0);
                    write(c.get(), rows, width, biases ? biases[expert] + start : nullptr, y + row * n + start, n);
                }
            }
        };
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < experts * parts; ++task) guard([&] { run(task); });
        guard.always([] { done_multiplying<bf16>(); });
    }
}

extern "C" int32_t grouped_matmul_bf16(const bf16* x, int64_t ld_x, const int64_t* counts, int64_t experts,
                                       const bf16* const* weights, const bf16* const* biases, int32_t transposed,
                                       int64_t total, int64_t n, int64_t k, bf16* y, int32_t threads) {
    return guarded([&](Guard& guard) {
        grouped_matmul(x, ld_x, counts, experts, weights, biases, transposed, total, n, k, y, threads, guard);
    });
}
