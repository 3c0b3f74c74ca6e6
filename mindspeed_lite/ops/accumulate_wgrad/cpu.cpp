// main_grad [N, K] += dy^T x for bf16 dy [M, N] and x [M, K], by oneDNN's micro-kernels.
//
// x is packed once: panels of PANEL columns, pairs of rows interleaved. A task takes BLOCK rows of the result and
// DEPTH rows of dy and x at a time: it transposes its part of dy, which stays in the core's own cache with the panel it
// meets, and every piece of the result is read and written once for DEPTH rows. Sums have the same order whatever the
// number of threads. Sizes are those that measured best on a processor with 1 MiB of second-level cache per core.
#include <memory>

#include "brgemm.h"

namespace {

constexpr int64_t BLOCK = 96, DEPTH = 1024;

// to [columns, TILE] = from [rows, columns] transposed; missing rows are zero. Going through a tile of its own, since
// rows of a matrix may be a power of two apart and then share the few lines of one cache set.
void transpose(const bf16* from, int64_t ld_from, int64_t rows, int64_t columns, bf16* to, int64_t ld_to) {
    alignas(64) uint16_t one[TILE * TILE], two[TILE * TILE];  // numbers of a struct are not moved as vectors
    if (rows < TILE || columns < TILE) std::memset(one, 0, sizeof one);
    for (int64_t row = 0; row < rows; ++row)
        std::memcpy(one + row * TILE, from + row * ld_from, columns * sizeof(bf16));
    // Five times: the row bits have become the column bits and the other way round.
    static_assert(TILE == 1 << 5);
    interleave<TILE * TILE>(one, two);
    interleave<TILE * TILE>(two, one);
    interleave<TILE * TILE>(one, two);
    interleave<TILE * TILE>(two, one);
    interleave<TILE * TILE>(one, two);
    for (int64_t column = 0; column < columns; ++column)
        std::memcpy(to + column * ld_to, two + column * TILE, TILE * sizeof(bf16));
}

// Rows `row` and `row + 1` of x into every panel, interleaved; what lies beyond the last row is zero.
void pack(const bf16* x, int64_t ld_x, int64_t row, int64_t rows, int64_t padded, int64_t columns, bf16* packed) {
    for (int64_t start = 0; start < columns; start += PANEL) {
        const int64_t width = std::min(PANEL, columns - start);
        const bf16* from = x + row * ld_x + start;
        pack_rows(row < rows ? from : nullptr, row + 1 < rows ? from + ld_x : nullptr, width,
                  packed + start * padded + row * width);
    }
}

void accumulate(float* main_grad, const bf16* dy, int64_t ld_dy, const bf16* x, int64_t ld_x, bf16* packed, int64_t rows,
                int64_t n, int64_t k, int threads, Guard& guard) {
    const int64_t padded = (rows + TILE - 1) / TILE * TILE, depth = std::min(DEPTH, padded);
    // One line more, so that rows of the transposed block do not share a cache set either.
    const int64_t ld = depth + TILE;
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, panels = (k + PANEL - 1) / PANEL;
    // Blocks alone may be too few tasks for all threads; then panels are shared out as well.
    const int64_t parts = std::min(panels, std::max<int64_t>(1, (4 * threads + blocks - 1) / blocks));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < padded; row += 2) pack(x, ld_x, row, rows, padded, k, packed);

        std::unique_ptr<bf16[]> transposed;
        guard([&] { transposed.reset(new bf16[BLOCK * ld]); });
        const auto run = [&](int64_t task) {
            const int64_t block = task / parts * BLOCK, height = std::min(BLOCK, n - block);
            const int64_t part = task % parts;
            const int64_t first = part * panels / parts * PANEL;
            const int64_t last = std::min(k, (part + 1) * panels / parts * PANEL);
            for (int64_t top = 0; top < padded; top += depth) {
                const int64_t deep = std::min(depth, padded - top);
                for (int64_t down = 0; down < deep; down += TILE)
                    for (int64_t across = 0; across < height; across += TILE)
                        transpose(dy + (top + down) * ld_dy + block + across, ld_dy,
                                  std::min(TILE, rows - top - down), std::min(TILE, height - across),
                                  &transposed[across * ld + down], ld);
                for (int64_t start = first; start < last; start += PANEL) {
                    const int64_t width = std::min(PANEL, k - start);
                    multiply(height, width, deep, transposed.get(), ld, packed + start * padded + top * width,
                             main_grad + block * k + start, k, true);
                }
            }
        };
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * parts; ++task) guard([&] { run(task); });
        guard.always([] { done_multiplying<bf16>(); });
    }
}

void accumulate_each(float* const* main_grads, const int64_t* counts, int64_t number, const bf16* dy, int64_t ld_dy,
                     const bf16* x, int64_t ld_x, int64_t n, int64_t k, int threads, Guard& guard) {
    const std::unique_ptr<int64_t[]> starts(new int64_t[number + 1]);
    starts[0] = 0;
    for (int64_t i = 0; i < number; ++i) starts[i + 1] = starts[i] + counts[i];
    const int64_t most = number ? *std::max_element(counts, counts + number) : 0;
#pragma omp parallel num_threads(threads)
    {
        std::unique_ptr<bf16[]> packed;
        guard([&] { packed.reset(new bf16[(most + TILE - 1) / TILE * TILE * k]); });
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < number; ++i)
            if (counts[i] && !guard.status())
                accumulate(main_grads[i], dy + starts[i] * ld_dy, ld_dy, x + starts[i] * ld_x, ld_x, packed.get(),
                           counts[i], n, k, 1, guard);
    }
}

}  // namespace

extern "C" int32_t accumulate_wgrad_bf16(float* main_grad, const bf16* dy, int64_t ld_dy, const bf16* x, int64_t ld_x,
                                         bf16* packed, int64_t rows, int64_t n, int64_t k, int threads) {
    return guarded([&](Guard& guard) {
        accumulate(main_grad, dy, ld_dy, x, ld_x, packed, rows, n, k, threads, guard);
    });
}

// The same for several at once: rows of dy and x belong to one after the other, `counts` of them to each. A thread
// takes whole ones, so that no thread waits for the others between two of them.
extern "C" int32_t accumulate_wgrads_bf16(float* const* main_grads, const int64_t* counts, int64_t number,
                                          const bf16* dy, int64_t ld_dy, const bf16* x, int64_t ld_x, int64_t n,
                                          int64_t k, int threads) {
    return guarded([&](Guard& guard) {
        accumulate_each(main_grads, counts, number, dy, ld_dy, x, ld_x, n, k, threads, guard);
    });
}
