/* Vectors of LANES floats, by the extension that GCC and Clang share; and functions that
 * decoder and trainer both use. */
#ifndef VECTORS_H
#define VECTORS_H

#include <stdint.h>

#define LANES 8

/* They may be unaligned, and may alias arrays of floats. */
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline Vector load(const float *x) { return *(const Vector *)x; }
static inline void store(float *x, Vector value) { *(Vector *)x = value; }
static inline Vector choose(Integers where, Vector a, Vector b)
{
    return (Vector)(((Integers)a & where) | ((Integers)b & ~where));
}

/* exp(x) within 2 units in the last place, by Cephes' polynomial; 0 below -87, and exp(88) above 88. */
static inline Vector exp_of(Vector x)
{
    Integers tiny = x < -87.0f;
    Vector zero = {0}, kept = choose(tiny, zero, choose(x > 88.0f, zero + 88.0f, x));
    Vector shifted = kept * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer in the low bits */
    Vector whole = shifted - 12582912.0f;
    Vector r = (kept - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    Vector power = (Vector)(((Integers)shifted - 0x4B400000 + 127) << 23);
    return choose(tiny, zero, p * power);
}

static inline float total(Vector x)
{
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* Turn scores into weights that sum to 1, in place; n is a multiple of LANES; -infinity gets weight 0. */
static inline void softmax(float *restrict score, int64_t n, float scale)
{
    Vector most = load(score), sum = {0};
    for (int64_t t = LANES; t < n; t += LANES)
        most = choose(load(score + t) > most, load(score + t), most);
    float largest = most[0];
    for (int64_t i = 1; i < LANES; i++)
        largest = most[i] > largest ? most[i] : largest;
    for (int64_t t = 0; t < n; t += LANES) {
        Vector weight = exp_of((load(score + t) - largest) * scale);
        store(score + t, weight);
        sum += weight;
    }
    float by = 1.0f / total(sum);
    for (int64_t t = 0; t < n; t += LANES)
        store(score + t, load(score + t) * by);
}

/* out = silu(gate) * up, where a row holds gate and then up; dim is a multiple of LANES. */
void swiglu(const float *restrict gate_up, float *restrict out, int64_t n, int64_t dim)
{
    for (int64_t row = 0; row < n; row++, gate_up += 2 * dim, out += dim)
        for (int64_t i = 0; i < dim; i += LANES) {
            Vector gate = load(gate_up + i);
            store(out + i, gate / (1.0f + exp_of(-gate)) * load(gate_up + dim + i));
        }
}

#endif
