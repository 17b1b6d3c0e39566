// Kernels over an engine's state in unified memory.
//
// Each does to its elements what the CPU's loop of the same purpose does, operation by operation in f32, so that both come
// to the same bits: compile with --fmad=false. Grid-stride loops only, without shared memory or synchronisation: what the
// stand-in for CUDA's driver (xtask/src/cuda) compiles for the CPU is this same file.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void
#define EACH(i, count)                                                                                                 \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += (u64)gridDim.x * blockDim.x)

// Between f32 and the 16-bit types, as optimizer/rounding.rs has it: to nearest, ties to even; what is no number stays so.

static __device__ inline float widen_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

static __device__ inline u16 round_to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    u32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (u16)((value != value ? bits | 0x00400000 : rounded) >> 16);
}

static __device__ inline float widen_f16(u16 half) {
    u32 sign = (u32)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff;
    if (exponent == 31)
        return __uint_as_float(sign | 0x7f800000 | (fraction ? 0x00400000 : 0) | fraction << 13);
    if (exponent == 0)
        return __uint_as_float(sign | __float_as_uint((float)fraction * 5.9604644775390625e-8f)); // 2^-24, exact
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

static __device__ inline u16 round_to_f16(float value) {
    u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffff;
    u16 sign = (u16)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000)
        return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);
    if (magnitude >= 0x477ff000) // 65520: halfway to what would follow the largest
        return sign | 0x7c00;
    if (magnitude < 0x38800000) // below 2^-14; numbers next to 0.5 are 2^-24 apart, as these are to be
        return sign | (u16)(__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000);
    return sign | (u16)((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}

// Where elements of a parameter lie in memory of a bucket's layout: in chunks of so many that begin `stride` apart.

static __device__ inline u64 spread(u64 i, u64 chunk, u64 stride) {
    return i < chunk ? i : i / chunk * stride + i % chunk;
}

// A gradient into its places in a bucket, or added to what is there.

static __device__ inline void place(float *slot, u32 is_first, float value) {
    *slot = is_first ? value : *slot + value;
}

KERNEL place_f32(const float *from, float *to, u64 count, u64 chunk, u64 stride, u32 is_first) {
    EACH(i, count) place(to + spread(i, chunk, stride), is_first, from[i]);
}

KERNEL place_bf16(const u16 *from, float *to, u64 count, u64 chunk, u64 stride, u32 is_first) {
    EACH(i, count) place(to + spread(i, chunk, stride), is_first, widen_bf16(from[i]));
}

KERNEL place_f16(const u16 *from, float *to, u64 count, u64 chunk, u64 stride, u32 is_first) {
    EACH(i, count) place(to + spread(i, chunk, stride), is_first, widen_f16(from[i]));
}

// Gradients on their way to other ranks in 16 bits, and back.

KERNEL narrow_bf16(const float *from, u16 *to, u64 count) {
    EACH(i, count) to[i] = round_to_bf16(from[i]);
}

KERNEL narrow_f16(const float *from, u16 *to, u64 count) {
    EACH(i, count) to[i] = round_to_f16(from[i]);
}

KERNEL widen_from_bf16(const u16 *from, float *to, u64 count) {
    EACH(i, count) to[i] = widen_bf16(from[i]);
}

KERNEL widen_from_f16(const u16 *from, float *to, u64 count) {
    EACH(i, count) to[i] = widen_f16(from[i]);
}

// Changes of gradients that are held. A flag is set, never cleared, by whichever threads find that it is to be.

static __device__ inline int is_finite(float value) { return (__float_as_uint(value) & 0x7fffffff) < 0x7f800000; }

KERNEL scale(float *values, u64 count, float factor) {
    EACH(i, count) values[i] *= factor;
}

KERNEL clamp(float *values, u64 count, float limit, u32 *overflow) {
    EACH(i, count) {
        float value = values[i];
        if (!is_finite(value))
            *overflow = 1;
        values[i] = value < -limit ? -limit : value > limit ? limit : value;
    }
}

KERNEL find_overflow(const float *values, u64 count, u32 *overflow) {
    EACH(i, count) {
        if (!is_finite(values[i]))
            *overflow = 1;
    }
}

// What the elements of each chunk contribute to a norm: 17 sums for each block of 32768, which the host joins as norm.rs
// does. Of each block, thread `lane` of 16 adds every 16th element, and the first also what is left when no 16 are. All
// chunks have as many blocks as the first: those behind the end of a shorter one have nothing to add.

static const u64 BLOCK = 1 << 15, LANES = 16, SUMS = LANES + 1;
enum { L1, L2, L3, INFINITE };

static __device__ inline double joined(double sum, float value, u32 norm) {
    double wide = (double)value;
    if (norm == INFINITE) {
        double magnitude = fabs(wide);
        return sum != sum || sum > magnitude ? sum : magnitude;
    }
    return sum + (norm == L1 ? fabs(wide) : norm == L2 ? wide * wide : fabs(wide * wide * wide));
}

KERNEL norm_sums(const float *values, u64 count, u64 chunk, u64 stride, u64 chunks, u32 norm, double *sums) {
    u64 blocks = (chunk + BLOCK - 1) / BLOCK;
    EACH(i, chunks * blocks * LANES) {
        u64 block = i / LANES, lane = i % LANES, part = block / blocks, within = block % blocks * BLOCK;
        u64 start = part * chunk + within, end = (part + 1) * chunk < count ? (part + 1) * chunk : count;
        u64 length = end <= start ? 0 : end - start < BLOCK ? end - start : BLOCK, whole = length - length % LANES;
        const float *elements = values + part * stride + within;
        double sum = 0, rest = 0;
        for (u64 at = lane; at < whole; at += LANES)
            sum = joined(sum, elements[at], norm);
        sums[block * SUMS + lane] = sum;
        if (lane == 0) {
            for (u64 at = whole; at < length; at++)
                rest = joined(rest, elements[at], norm);
            sums[block * SUMS + LANES] = rest;
        }
    }
}

// Update rules, with the formulas of optimizer/*.rs. `values` are f32; `copy` is what the model computes with where that
// is 16 bits (`form` 1: bf16, 2: f16), and not used otherwise (0). Gradient and state are spread as in a bucket.

static __device__ inline void write(float *values, u16 *copy, u32 form, u64 i, float value) {
    values[i] = value;
    if (form == 1)
        copy[i] = round_to_bf16(value);
    else if (form == 2)
        copy[i] = round_to_f16(value);
}

#define STEP(name, Factors)                                                                                            \
    KERNEL name(float *values, u16 *copy, u32 form, const float *gradient, float *first, float *second, float *third,  \
                u64 count, u64 chunk, u64 stride, Factors f)

struct Adam {
    float keep, penalty, beta1, rest1, beta2, rest2, step_size, inverse_root_correction, epsilon, scale;
};

static __device__ inline void average(const Adam &f, float g, float *m, float *v) {
    *m = f.beta1 * *m + f.rest1 * g;
    *v = f.beta2 * *v + f.rest2 * (g * g);
}

static __device__ inline float change(const Adam &f, float m, float v) {
    return f.step_size * m / (sqrtf(v) * f.inverse_root_correction + f.epsilon);
}

STEP(step_adam_decoupled, Adam) {
    EACH(i, count) {
        u64 at = spread(i, chunk, stride);
        average(f, gradient[at] * f.scale, first + at, second + at);
        write(values, copy, form, i, values[i] * f.keep - change(f, first[at], second[at]));
    }
}

STEP(step_adam_penalty, Adam) {
    EACH(i, count) {
        u64 at = spread(i, chunk, stride);
        float p = values[i];
        average(f, gradient[at] * f.scale + f.penalty * p, first + at, second + at);
        write(values, copy, form, i, p - change(f, first[at], second[at]));
    }
}

STEP(step_adam_largest, Adam) {
    EACH(i, count) {
        u64 at = spread(i, chunk, stride);
        float p = values[i];
        average(f, gradient[at] * f.scale + f.penalty * p, first + at, second + at);
        third[at] = second[at] <= third[at] ? third[at] : second[at];
        write(values, copy, form, i, p * f.keep - change(f, first[at], third[at]));
    }
}

struct Sgd {
    float rate, decay, scale, keep, add, along, gradient;
};

STEP(step_sgd, Sgd) {
    EACH(i, count) {
        u64 at = spread(i, chunk, stride);
        float p = values[i];
        write(values, copy, form, i, p - f.rate * (gradient[at] * f.scale + f.decay * p));
    }
}

STEP(step_sgd_momentum, Sgd) {
    EACH(i, count) {
        u64 at = spread(i, chunk, stride);
        float p = values[i], g = gradient[at] * f.scale + f.decay * p;
        first[at] = f.keep * first[at] + f.add * g;
        write(values, copy, form, i, p - f.rate * (f.gradient * g + f.along * first[at]));
    }
}

struct Lion {
    float rate, keep, beta1, rest1, beta2, rest2, scale;
};

STEP(step_lion, Lion) {
    EACH(i, count) {
        u64 at = spread(i, chunk, stride);
        float g = gradient[at] * f.scale, direction = f.beta1 * first[at] + f.rest1 * g;
        float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction == 0 ? 0.0f : direction;
        write(values, copy, form, i, values[i] * f.keep - f.rate * sign);
        first[at] = f.beta2 * first[at] + f.rest2 * g;
    }
}

struct Adagrad {
    float rate, decay, epsilon, scale;
};

STEP(step_adagrad, Adagrad) {
    EACH(i, count) {
        u64 at = spread(i, chunk, stride);
        float p = values[i], g = gradient[at] * f.scale + f.decay * p;
        first[at] += g * g;
        write(values, copy, form, i, p - f.rate * g / (sqrtf(first[at]) + f.epsilon));
    }
}
