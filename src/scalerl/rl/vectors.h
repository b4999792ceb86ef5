/* Vectors of LANES floats, by the extension that GCC and Clang share. */
#ifndef VECTORS_H
#define VECTORS_H

#include <stdint.h>

#define LANES 8

/* They may stand anywhere, and overlay arrays of floats. */
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

#endif
