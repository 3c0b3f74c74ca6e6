// Exceptions that stay inside: one that left an OpenMP region, or a function that Python calls, would end the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

// What has gone wrong in a kernel, for all of its threads.
class Guard {
    std::atomic<int32_t> status_{0};

   public:
    // 0 for nothing, 1 for memory, 2 for whatever else (`native.Library`).
    int32_t status() const { return status_.load(std::memory_order_relaxed); }

    // Runs `body`, unless something has gone wrong already. A thread that stops goes on to the end of its loops, so
    // that the others do not wait for it.
    template <typename Body>
    inline void operator()(Body&& body) noexcept {
        if (!status()) always(body);
    }

    // Runs `body`, whatever has happened before.
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

// A whole kernel, given its guard, as a function for Python.
template <typename Body>
inline int32_t guarded(Body&& body) noexcept {
    Guard guard;
    guard([&] { body(guard); });
    return guard.status();
}
