// The attention kernel with products of the test's own in place of oneDNN's micro-kernels: plain loops, which have bf16
// pairs on every processor, and which keep account of who multiplied what.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <tuple>

#pragma GCC visibility push(hidden)
namespace c10 {
struct BFloat16 {
    uint16_t bits;
};
}  // namespace c10
namespace at::native::cpublas {
void brgemm(int64_t rows, int64_t columns, int64_t depth, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
            const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool is_vnni);
void brgemm(int64_t rows, int64_t columns, int64_t depth, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
            const float* a, const float* b, float* c, bool is_vnni);
void brgemm_release(bool is_vnni);
}  // namespace at::native::cpublas
#pragma GCC visibility pop

#include "cpu.cpp"

namespace {

using Size = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool>;
std::mutex account;
std::set<Size> sizes;
std::set<std::thread::id> workers;
// Threads that wait for one another before they multiply.
std::atomic<int64_t> expected{1};
// Products until one fails; below 0 none does.
std::atomic<int64_t> left{-1};

void note(const Size& size) {
    if (left.load() >= 0 && left.fetch_sub(1) == 0) throw std::runtime_error("as the test wants it");
    {
        const std::lock_guard<std::mutex> hold(account);
        sizes.insert(size);
        workers.insert(std::this_thread::get_id());
    }
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
        {
            const std::lock_guard<std::mutex> hold(account);
            if (static_cast<int64_t>(workers.size()) >= expected) return;
        }
        if (std::chrono::steady_clock::now() - start > std::chrono::seconds(20)) return;
        std::this_thread::yield();
    }
}

}  // namespace

namespace at::native::cpublas {
void brgemm(int64_t rows, int64_t columns, int64_t depth, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
            const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool) {
    note({rows, columns, depth, ld_a, ld_b, ld_c, add});
    const bf16 *left_side = reinterpret_cast<const bf16*>(a), *right_side = reinterpret_cast<const bf16*>(b);
    for (int64_t i = 0; i < rows; ++i) {
        float* row = c + i * ld_c;
        if (!add) std::fill(row, row + columns, 0.0f);
        for (int64_t k = 0; k < depth; ++k) {
            const float x = load(left_side + i * ld_a + k);
            const bf16* line = right_side + k / 2 * ld_b * 2 + k % 2;
            for (int64_t j = 0; j < columns; ++j) row[j] += x * load(line + 2 * j);
        }
    }
}

void brgemm(int64_t rows, int64_t columns, int64_t depth, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
            const float* a, const float* b, float* c, bool) {
    note({rows, columns, depth, ld_a, ld_b, ld_c, add});
    for (int64_t i = 0; i < rows; ++i) {
        float* row = c + i * ld_c;
        if (!add) std::fill(row, row + columns, 0.0f);
        for (int64_t k = 0; k < depth; ++k) {
            for (int64_t j = 0; j < columns; ++j) row[j] += a[i * ld_a + k] * b[k * ld_b + j];
        }
    }
}

void brgemm_release(bool) {}
}  // namespace at::native::cpublas

// Begins a new account: so many threads wait for one another, and so many products succeed (below 0: all).
extern "C" int32_t begin(int64_t threads, int64_t products) {
    const std::lock_guard<std::mutex> hold(account);
    sizes.clear();
    workers.clear();
    expected = threads;
    left = products;
    return 0;
}

// How many sizes of product there were, and how many threads multiplied.
extern "C" int32_t found(int64_t* counts) {
    const std::lock_guard<std::mutex> hold(account);
    counts[0] = static_cast<int64_t>(sizes.size());
    counts[1] = static_cast<int64_t>(workers.size());
    return 0;
}
