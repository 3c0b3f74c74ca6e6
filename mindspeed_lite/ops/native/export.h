// Exports kernels by name, with the types of their parameters, for `native.Library`.
#pragma once

#include <type_traits>

#include "guard.h"

struct Exported {
    const char* parameters;
    const void* call;
};

// `_TYPES` in native/__init__.py.
template <typename T>
constexpr char letter() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_same_v<T, float>) return 'f';
    return sizeof(T) == 8 ? 'l' : 'i';
}

template <auto kernel>
struct Export;

template <typename... Given, void (*kernel)(Guard&, Given...)>
struct Export<kernel> {
    static constexpr char parameters[] = {letter<Given>()..., 0};
    static int32_t call(Given... given) noexcept {
        Guard guard;
        guard([&] { kernel(guard, given...); });
        return guard.status();
    }
    static inline const void* const address = reinterpret_cast<const void*>(&call);
};

#define EXPORT(NAME, ...) \
    extern "C" const Exported exported_##NAME { Export<&__VA_ARGS__>::parameters, Export<&__VA_ARGS__>::address }
// A kernel that exists for each dtype.
#define EXPORT_DTYPES(NAME, KERNEL)    \
    EXPORT(NAME##_bf16, KERNEL<bf16>); \
    EXPORT(NAME##_fp32, KERNEL<float>)
