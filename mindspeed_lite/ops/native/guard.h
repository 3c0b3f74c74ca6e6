// Contains exceptions: leaving an OpenMP region or a C function they would end the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

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
