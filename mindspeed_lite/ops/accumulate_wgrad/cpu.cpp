// main_grad [N, K] += dy^T x for bf16 dy [M, N] and x [M, K], by oneDNN's micro-kernels, which PyTorch carries and
// exports: C += A B for small row-major A [n, m] and C [n, k] in memory of any leading dimension, and B [m, k] with
// pairs of rows interleaved, as the processor's bf16 instructions read them.
//
// x is packed once: panels of PANEL columns, pairs of rows interleaved. A task takes BLOCK rows of the result and
// DEPTH rows of dy and x at a time: it transposes its part of dy, which stays in the core's own cache with the panel it
// meets, and every piece of the result is read and written once for DEPTH rows. Sums have the same order whatever the
// number of threads. Sizes are those that measured best on a processor with 1 MiB of second-level cache per core.
#include <memory>

#include "numbers.h"

namespace c10 {
struct BFloat16;
}
namespace at::native::cpublas {
void brgemm(int64_t rows, int64_t columns, int64_t depth, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
            const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool is_vnni);
void brgemm_release(bool is_vnni);
}  // namespace at::native::cpublas

namespace {

constexpr int64_t TILE = 32, BLOCK = 96, PANEL = 64, DEPTH = 1024;

void multiply(int64_t rows, int64_t columns, int64_t depth, const bf16* a, int64_t ld_a, const bf16* b, float* c,
              int64_t ld_c) {
    at::native::cpublas::brgemm(rows, columns, depth, ld_a, columns, ld_c, true,
                                reinterpret_cast<const c10::BFloat16*>(a), reinterpret_cast<const c10::BFloat16*>(b), c,
                                true);
}

// Interleaves the halves of a tile. In an element's index, of row and column bits, the first bit becomes the last.
void interleave(const bf16* __restrict from, bf16* __restrict to) {
    constexpr int64_t half = TILE * TILE / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        to[2 * i].bits = from[i].bits;
        to[2 * i + 1].bits = from[i + half].bits;
    }
}

// to [columns, TILE] = from [rows, columns] transposed; missing rows are zero. Going through a tile of its own, since
// rows of a matrix may be a power of two apart and then share the few lines of one cache set.
void transpose(const bf16* from, int64_t ld_from, int64_t rows, int64_t columns, bf16* to, int64_t ld_to) {
    alignas(64) bf16 one[TILE * TILE], two[TILE * TILE];
    if (rows < TILE || columns < TILE) std::memset(one, 0, sizeof one);
    for (int64_t row = 0; row < rows; ++row)
        std::memcpy(one + row * TILE, from + row * ld_from, columns * sizeof(bf16));
    // Five times: the row bits have become the column bits and the other way round.
    static_assert(TILE == 1 << 5);
    interleave(one, two);
    interleave(two, one);
    interleave(one, two);
    interleave(two, one);
    interleave(one, two);
    for (int64_t column = 0; column < columns; ++column)
        std::memcpy(to + column * ld_to, two + column * TILE, TILE * sizeof(bf16));
}

// Rows `row` and `row + 1` of x into every panel, interleaved; what lies beyond the last row is zero.
void pack(const bf16* x, int64_t ld_x, int64_t row, int64_t rows, int64_t padded, int64_t columns, bf16* packed) {
    for (int64_t start = 0; start < columns; start += PANEL) {
        const int64_t width = std::min(PANEL, columns - start);
        bf16* to = packed + start * padded + row * width;
        const bf16* from = x + row * ld_x + start;
        if (row + 1 < rows) {
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) {
                to[2 * i].bits = from[i].bits;
                to[2 * i + 1].bits = from[i + ld_x].bits;
            }
        } else {
            for (int64_t i = 0; i < width; ++i) {
                to[2 * i].bits = row < rows ? from[i].bits : 0;
                to[2 * i + 1].bits = 0;
            }
        }
    }
}

}  // namespace

extern "C" void accumulate_wgrad_bf16(float* main_grad, const bf16* dy, int64_t ld_dy, const bf16* x, int64_t ld_x,
                                      bf16* packed, int64_t rows, int64_t n, int64_t k, int threads) {
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

        const std::unique_ptr<bf16[]> transposed(new bf16[BLOCK * ld]);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * parts; ++task) {
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
                             main_grad + block * k + start, k);
                }
            }
        }
        at::native::cpublas::brgemm_release(true);
    }
}

// Whether the micro-kernel works here: PyTorch throws where the processor has none.
extern "C" void probe(int32_t* right) {
    bf16 a[TILE * TILE], b[TILE * TILE];
    float c[TILE * TILE];
    for (int64_t i = 0; i < TILE * TILE; ++i) {
        store(a + i, 1.0f);
        store(b + i, 0.5f);
        c[i] = 2.0f;
    }
    *right = 0;
    try {
        multiply(TILE, TILE, TILE, a, TILE, b, c, TILE);
        at::native::cpublas::brgemm_release(true);
    } catch (...) {
        return;
    }
    *right = std::all_of(c, c + TILE * TILE, [](float value) { return value == 2.0f + TILE * 0.5f; });
}
