// Contains exceptions: leaving an OpenMP region or a C function they would end the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <optional>

// Error status of a kernel, shared by its threads.
class Guard {
    std::atomic<int32_t> status_{0};

   public:
    // 0: none, 1: out of memory, 2: other (`native.Library`).
    int32_t status() const { return status_.load(std::memory_order_relaxed); }

    // Runs `body` unless a thread has failed. Failed threads still finish their loops, so that others do not wait for
    // them.
    template <typename Body>
    inline void operator()(Body&& body) noexcept {
        if (!status()) always(body);
    }

    template <typename Body>
    inline void always(Body&& body) noexcept {
        try {
            body();
        } catch (const std::bad_alloc&) {
            status_ = 1;
        } catch (...) {
            status_ = 2;
        }
    }
};

// Runs body(row, scratch) for every row; each thread makes its own scratch.
template <typename Make, typename Body>
void each_row(Guard& guard, int64_t rows, int threads, const Make& make, const Body& body) {
#pragma omp parallel num_threads(threads)
    {
        std::optional<decltype(make())> scratch;
        guard([&] { scratch.emplace(make()); });
#pragma omp for schedule(static, 16)
        for (int64_t row = 0; row < rows; ++row) guard([&] { body(row, *scratch); });
    }
}
