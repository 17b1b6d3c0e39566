/* A stand-in for CUDA's driver, cuBLAS and cuRAND, for tests on machines without a GPU.
 *
 * What is put into a stream is done as late as CUDA allows: when somebody waits for it. So a program that looks at memory
 * before a copy to it is over, or changes memory before a copy from it is over, finds wrong values every time, not now and
 * then. Memory of the device is the host's; what is not set is 0xff, which is not a number, and so is what has been freed.
 * Copies from and to memory that is not page-locked are as CUDA documents them: over, or staged, when the call returns.
 *
 * Unified memory is reached by host and device alike; nothing is brought from one to the other but what is late. With the
 * variable STAND_IN_KEEPS_MEMORY_APART the device says that it has none which both reach at one time.
 *
 * Copies and fills outside of an allocation, arguments of kernels that begin there, and page-locked memory that is freed
 * while a copy has it, end the program; how far a kernel reaches is not seen. Of candle's
 * kernels there are those that fill and add; others are not found, which is an error of the op. Kernels of the engine's are
 * all there, compiled for the CPU (kernels_on_cpu.cpp).
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_READY = 600 };

typedef struct {
    const char *name;
    void **(*keep)(void **arguments);
    void (*run)(void **kept, unsigned grid, unsigned block);
} Kernel;
extern const Kernel kernels[];

typedef struct Op Op;
typedef struct Stream Stream;
struct Op {
    enum { COPY, SET, RECORD, WAIT, FREE, FILL, ADD, ADD_F16, KERNEL } kind;
    Stream *stream;
    Op *next;
    int done;
    char *to;
    const char *from, *other;
    size_t size;
    uint32_t value;
    Op *target;
    char *staged;
    const Kernel *kernel;
    void **kept;
    unsigned grid, block;
};
struct Stream {
    Op *first, *last;
    Stream *another;
};
typedef struct {
    Op *recorded;
} Event;
typedef struct Range Range;
struct Range {
    char *start;
    size_t size;
    enum { DEVICE, PINNED, UNIFIED } kind;
    Range *next;
};

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static Range *ranges;
static Stream *streams;
static int context;
static __thread void *current;

static void fail(const char *what) {
    fprintf(stderr, "a stand-in for CUDA's driver: %s\n", what);
    abort();
}

static Range *find(const void *at, size_t size) {
    for (Range *range = ranges; range; range = range->next)
        if ((const char *)at >= range->start && (const char *)at + size <= range->start + range->size)
            return range;
    return NULL;
}

static void check_device(const void *at, size_t size) {
    Range *range = find(at, size);
    if (!range || range->kind == PINNED)
        fail("access outside of the device's allocations");
}

static int touches(const char *at, size_t size, const Range *range) {
    return at < range->start + range->size && range->start < at + size;
}

/* Called when a kernel is launched. */
void check_argument(const void *pointer) {
    if (pointer)
        check_device(pointer, 1);
}

static void add_range(char *start, size_t size, int kind) {
    Range *range = malloc(sizeof *range);
    *range = (Range){start, size, kind, ranges};
    ranges = range;
}

static Range *take_range(const void *start) {
    for (Range **place = &ranges; *place; place = &(*place)->next)
        if ((*place)->start == start) {
            Range *range = *place;
            *place = range->next;
            return range;
        }
    fail("something is freed that is not allocated");
    return NULL;
}

static float widen(const char *at, size_t size) {
    uint32_t bits = 0;
    float wide;
    if (size == 2) {
        uint16_t half;
        memcpy(&half, at, 2);
        bits = (uint32_t)half << 16;
    } else {
        memcpy(&bits, at, 4);
    }
    memcpy(&wide, &bits, 4);
    return wide;
}

static void narrow(float wide, char *at, size_t size) {
    uint32_t bits;
    memcpy(&bits, &wide, 4);
    if (size == 2) {
        uint16_t half = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        memcpy(at, &half, 2);
    } else {
        memcpy(at, &bits, 4);
    }
}

static void drain(Stream *stream, Op *until);

/* `size` is in bytes for memory and in elements for kernels, whose elements have `value` bytes where they add. */
static void run(Op *op) {
    switch (op->kind) {
    case COPY:
        memcpy(op->to, op->from, op->size);
        free(op->staged);
        break;
    case SET:
        memset(op->to, (int)op->value, op->size);
        break;
    case RECORD:
        break;
    case WAIT:
        if (op->target && !op->target->done)
            drain(op->target->stream, op->target);
        break;
    case FREE:
        memset(op->to, 0xff, op->size);
        break; /* never given back: what still uses it finds no numbers */
    case FILL:
        for (size_t i = 0; i < op->size; i++)
            memcpy(op->to + 4 * i, &op->value, 4);
        break;
    case ADD:
        for (size_t i = 0; i < op->size; i++) {
            size_t at = op->value * i;
            narrow(widen(op->from + at, op->value) + widen(op->other + at, op->value), op->to + at, op->value);
        }
        break;
    case ADD_F16:
        for (size_t i = 0; i < op->size; i++)
            ((_Float16 *)op->to)[i] = (float)((_Float16 *)op->from)[i] + (float)((_Float16 *)op->other)[i];
        break;
    case KERNEL:
        op->kernel->run(op->kept, op->grid, op->block);
        break;
    }
    op->done = 1;
}

static void drain(Stream *stream, Op *until) {
    while (stream->first && !(until && until->done)) {
        Op *op = stream->first;
        stream->first = op->next;
        if (!stream->first)
            stream->last = NULL;
        run(op);
    }
}

static Op *put(Stream *stream, Op op) {
    Op *kept = malloc(sizeof op);
    op.stream = stream;
    op.next = NULL;
    op.done = 0;
    *kept = op;
    if (stream->last)
        stream->last->next = kept;
    else
        stream->first = kept;
    stream->last = kept;
    return kept;
}

#define LOCKED(...)                                                                                                    \
    pthread_mutex_lock(&lock);                                                                                         \
    __VA_ARGS__;                                                                                                       \
    pthread_mutex_unlock(&lock);                                                                                       \
    return SUCCESS

Result cuInit(unsigned flags) { return (void)flags, SUCCESS; }
Result cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
Result cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
Result cuDeviceGet(int *device, int number) { return *device = number, number == 0 ? SUCCESS : 101; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    enum { CONCURRENT_MANAGED_ACCESS = 89 };
    (void)device;
    *value = !(attribute == CONCURRENT_MANAGED_ACCESS && getenv("STAND_IN_KEEPS_MEMORY_APART"));
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void **retained, int device) { return (void)device, *retained = &context, SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, SUCCESS; }
Result cuCtxGetCurrent(void **found) { return *found = current, SUCCESS; }
Result cuCtxSetCurrent(void *chosen) { return current = chosen, SUCCESS; }
Result cuDeviceGetMemPool(void **pool, int device) { return (void)device, *pool = &context, SUCCESS; }
Result cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
    return (void)pool, (void)attribute, *(uint64_t *)value == UINT64_MAX ? SUCCESS : INVALID_VALUE;
}
Result cuGetErrorName(int error, const char **name) {
    return *name = error == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : "an error of a stand-in", SUCCESS;
}
Result cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }
/* Other streams' work is left where it is: nobody here waits for a whole context to have memory in order. */
Result cuCtxSynchronize(void) { return SUCCESS; }

Result cuStreamCreate(Stream **stream, unsigned flags) {
    (void)flags;
    LOCKED({
        *stream = calloc(1, sizeof **stream);
        (*stream)->another = streams;
        streams = *stream;
    });
}
Result cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    return (void)priority, cuStreamCreate(stream, flags);
}
Result cuStreamDestroy_v2(Stream *stream) { LOCKED(drain(stream, NULL)); }
Result cuStreamSynchronize(Stream *stream) { LOCKED(drain(stream, NULL)); }
Result cuStreamGetCaptureInfo_v2(Stream *stream, int *status) { return (void)stream, *status = 0, SUCCESS; }
Result cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    (void)flags;
    LOCKED(put(stream, (Op){.kind = WAIT, .target = event->recorded}));
}

Result cuEventCreate(Event **event, unsigned flags) { return (void)flags, *event = calloc(1, sizeof **event), SUCCESS; }
Result cuEventDestroy_v2(Event *event) { return free(event), SUCCESS; }
Result cuEventRecord(Event *event, Stream *stream) { LOCKED(event->recorded = put(stream, (Op){.kind = RECORD})); }
Result cuEventSynchronize(Event *event) {
    LOCKED(if (event->recorded) drain(event->recorded->stream, event->recorded));
}
Result cuEventQuery(Event *event) { return !event->recorded || event->recorded->done ? SUCCESS : NOT_READY; }

static Result allocate(void **at, size_t size, int kind) {
    if (size == 0)
        return INVALID_VALUE;
    if (posix_memalign(at, 4096, size))
        return OUT_OF_MEMORY;
    memset(*at, 0xff, size);
    LOCKED(add_range(*at, size, kind));
}
Result cuMemAllocAsync(void **at, size_t size, Stream *stream) { return (void)stream, allocate(at, size, DEVICE); }
Result cuMemFreeAsync(void *at, Stream *stream) {
    LOCKED({
        Range *range = take_range(at);
        put(stream, (Op){.kind = FREE, .to = at, .size = range->size});
    });
}
Result cuMemHostAlloc(void **at, size_t size, unsigned flags) { return (void)flags, allocate(at, size, PINNED); }
Result cuMemFreeHost(void *at) {
    LOCKED({
        Range *range = take_range(at);
        for (Stream *stream = streams; stream; stream = stream->another)
            for (Op *op = stream->first; op; op = op->next)
                if (op->kind == COPY && (touches(op->from, op->size, range) || touches(op->to, op->size, range)))
                    fail("page-locked memory is freed that a copy under way has");
        free(range->start);
    });
}

Result cuMemAllocManaged(void **at, size_t size, unsigned flags) { return (void)flags, allocate(at, size, UNIFIED); }
Result cuMemFree_v2(void *at) {
    LOCKED({
        Range *range = take_range(at);
        for (Stream *stream = streams; stream; stream = stream->another)
            for (Op *op = stream->first; op; op = op->next)
                if (op->kind != FREE && (touches(op->from, op->size, range) || touches(op->to, op->size, range)))
                    fail("unified memory is freed that work under way has");
        memset(range->start, 0xff, range->size); /* never given back, as above */
    });
}
/* Where the pages are is nothing that a program could see here. */
Result cuMemPrefetchAsync_v2(const void *at, size_t size, long long location, unsigned flags, Stream *stream) {
    (void)location, (void)flags, (void)stream;
    LOCKED(check_device(at, size));
}
Result cuPointerGetAttribute(void *value, int attribute, const void *at) {
    enum { IS_MANAGED = 8, DEVICE_ORDINAL = 9 };
    pthread_mutex_lock(&lock);
    Range *range = find(at, 1);
    pthread_mutex_unlock(&lock);
    if (!range || (attribute != IS_MANAGED && attribute != DEVICE_ORDINAL))
        return INVALID_VALUE;
    return *(int *)value = attribute == IS_MANAGED && range->kind == UNIFIED, SUCCESS;
}

Result cuMemsetD8Async(char *to, unsigned char value, size_t size, Stream *stream) {
    LOCKED({
        check_device(to, size);
        put(stream, (Op){.kind = SET, .to = to, .value = value, .size = size});
    });
}
Result cuMemcpyDtoDAsync_v2(char *to, const char *from, size_t size, Stream *stream) {
    LOCKED({
        check_device(to, size);
        check_device(from, size);
        put(stream, (Op){.kind = COPY, .to = to, .from = from, .size = size});
    });
}
Result cuMemcpyHtoDAsync_v2(char *to, const void *from, size_t size, Stream *stream) {
    LOCKED({
        check_device(to, size);
        char *staged = NULL;
        if (!find(from, size)) {
            staged = malloc(size);
            memcpy(staged, from, size);
            from = staged;
        }
        put(stream, (Op){.kind = COPY, .to = to, .from = from, .size = size, .staged = staged});
    });
}
Result cuMemcpyDtoHAsync_v2(void *to, const char *from, size_t size, Stream *stream) {
    LOCKED({
        check_device(from, size);
        Op *op = put(stream, (Op){.kind = COPY, .to = to, .from = from, .size = size});
        if (!find(to, size))
            drain(stream, op);
    });
}

static const struct {
    const char *name;
    int kind;
    unsigned size;
} KERNELS[] = {{"const_set_f32", FILL, 4}, {"badd_f32", ADD, 4}, {"badd_bf16", ADD, 2}, {"badd_f16", ADD_F16, 2}};
enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };

Result cuModuleLoadData(void **module, const void *image) { return (void)image, *module = &context, SUCCESS; }
Result cuModuleUnload(void *module) { return (void)module, SUCCESS; }
Result cuModuleGetFunction(const void **function, void *module, const char *name) {
    (void)module;
    for (int number = 0; number < KERNEL_COUNT; number++)
        if (!strcmp(KERNELS[number].name, name))
            return *function = &KERNELS[number], SUCCESS;
    for (const Kernel *kernel = kernels; kernel->name; kernel++)
        if (!strcmp(kernel->name, name))
            return *function = kernel, SUCCESS;
    fprintf(stderr, "a stand-in for CUDA's driver has no kernel %s\n", name);
    return NOT_FOUND;
}
/* A kernel of the engine's, or one of candle's, whose arguments are: how many elements, dimensions, their layout (none if dense), and operands. */
Result cuLaunchKernel(const void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, Stream *stream, void **arguments, void **extra) {
    (void)gy, (void)gz, (void)by, (void)bz, (void)shared, (void)extra;
    const char *first = (const char *)KERNELS;
    if ((const char *)function < first || (const char *)function >= first + sizeof KERNELS) {
        const Kernel *kernel = function;
        LOCKED({
            void **kept = kernel->keep(arguments);
            put(stream, (Op){.kind = KERNEL, .kernel = kernel, .kept = kept, .grid = gx, .block = bx});
        });
    }
    int number = (int)((const char *)function - (const char *)KERNELS) / (int)sizeof *KERNELS;
    size_t count = *(size_t *)arguments[0], layout = *(size_t *)arguments[2], size = KERNELS[number].size;
    if (layout)
        fail("kernels here are for dense tensors");
    LOCKED({
        if (KERNELS[number].kind == FILL) {
            char *to = *(char **)arguments[4];
            check_device(to, count * size);
            put(stream, (Op){.kind = FILL, .to = to, .value = *(uint32_t *)arguments[3], .size = count});
        } else {
            const char *left = *(char **)arguments[3], *right = *(char **)arguments[4];
            char *to = *(char **)arguments[5];
            check_device(left, count * size);
            check_device(right, count * size);
            check_device(to, count * size);
            int kind = KERNELS[number].kind;
            put(stream, (Op){.kind = kind, .to = to, .from = left, .other = right, .value = size, .size = count});
        }
    });
}

Result cublasCreate_v2(void **handle) { return *handle = &context, SUCCESS; }
Result cublasDestroy_v2(void *handle) { return (void)handle, SUCCESS; }
Result cublasSetStream_v2(void *handle, void *stream) { return (void)handle, (void)stream, SUCCESS; }
Result curandCreateGenerator(void **generator, int kind) { return (void)kind, *generator = &context, SUCCESS; }
Result curandDestroyGenerator(void *generator) { return (void)generator, SUCCESS; }
Result curandSetStream(void *generator, void *stream) { return (void)generator, (void)stream, SUCCESS; }
Result curandSetPseudoRandomGeneratorSeed(void *generator, unsigned long long seed) {
    return (void)generator, (void)seed, SUCCESS;
}
