/* Kernels of CUDA as functions of the CPU, for the stand-in for the driver: a thread is a turn of a loop.
 *
 * What includes this includes the kernels after it, then has REGISTER(name) for each and END.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>
#include <utility>

struct Dim {
    unsigned x, y, z;
};
static thread_local Dim gridDim, blockDim, blockIdx, threadIdx;

#define __global__
#define __device__

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* What the driver knows of a kernel: its arguments are kept when it is launched, and it runs when the stream comes to it. */
struct Kernel {
    const char *name;
    void **(*keep)(void **arguments);
    void (*run)(void **kept, unsigned grid, unsigned block);
};

extern "C" void check_argument(const void *pointer);

template <class A> static void *kept(void *argument) {
    return memcpy(malloc(sizeof(A)), argument, sizeof(A));
}
template <class A> static void check(const void *argument) {
    if constexpr (std::is_pointer_v<A>)
        check_argument(*(void *const *)argument);
    else
        (void)argument;
}

template <auto kernel> struct Of;
template <class... A, void (*kernel)(A...)> struct Of<kernel> {
    static void **keep(void **arguments) {
        void **all = (void **)malloc(sizeof...(A) * sizeof(void *));
        keep_each(arguments, all, std::index_sequence_for<A...>());
        return all;
    }
    static void run(void **kept, unsigned grid, unsigned block) {
        gridDim = {grid, 1, 1};
        blockDim = {block, 1, 1};
        for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
                call(kept, std::index_sequence_for<A...>());
        for (size_t number = 0; number < sizeof...(A); number++)
            free(kept[number]);
        free(kept);
    }

  private:
    template <size_t... N> static void keep_each(void **arguments, void **all, std::index_sequence<N...>) {
        (check<A>(arguments[N]), ...);
        ((all[N] = kept<A>(arguments[N])), ...);
    }
    template <size_t... N> static void call(void **kept, std::index_sequence<N...>) { kernel(*(A *)kept[N]...); }
};

#define REGISTER(name) {#name, Of<name>::keep, Of<name>::run},
#define END {nullptr, nullptr, nullptr}
