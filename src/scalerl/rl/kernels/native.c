/* The non-GEMM kernels of the forward pass of a decoder; compiled and called by fused.py.
 *
 * All arrays are float32 and row-major, and every size but a number of tokens or positions is a multiple of LANES.
 * A store of keys and values holds blocks of BLOCK positions: keys as [block][BLOCK / LANES][kv_heads][head_dim]
 * [LANES], values as [block][BLOCK][kv_heads][head_dim]. So scores run along positions and mixtures along dimensions,
 * both in whole vectors. A table has the blocks of each slot, in the order of its positions, `columns` for each. Every
 * token is computed on its own, in a fixed order: other tokens of a pass do not change a bit of it.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

enum { BLOCK = 32 }; /* positions, as in cache_blocks.py */

static const Integers LANE = {0, 1, 2, 3, 4, 5, 6, 7};

typedef struct {
    int64_t heads, kv_heads, head_dim;
    float scale, eps;
} Shape;

typedef struct {
    float *keys, *values;
    const int64_t *table;
    int64_t columns;
} Store;

/* out = x / sqrt(mean(x^2) + eps) * weight, row by row. */
void rms_norm(const float *restrict x, const float *restrict weight, float eps, float *restrict out, int64_t n,
              int64_t dim)
{
    for (int64_t row = 0; row < n; row++, x += dim, out += dim) {
        Vector squares = {0};
        for (int64_t i = 0; i < dim; i += LANES)
            squares += load(x + i) * load(x + i);
        float by = 1.0f / sqrtf(total(squares) / (float)dim + eps);
        for (int64_t i = 0; i < dim; i += LANES)
            store(out + i, load(x + i) * by * load(weight + i));
    }
}

/* One head of a query or key: normalised if `weight` is given (Qwen3), then rotated by its position. */
static inline void rotate(const float *restrict x, const float *restrict weight, const float *restrict cos,
                          const float *restrict sin, const Shape *s, float *restrict out)
{
    int64_t half = s->head_dim / 2;
    float normed[s->head_dim];
    if (weight) {
        rms_norm(x, weight, s->eps, normed, 1, s->head_dim);
        x = normed;
    }
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[half + i] * sin[i];
        out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
    }
}

/* The place of position t of the slot that has these blocks. */
static inline int64_t place(const int64_t *restrict blocks, int64_t t)
{
    return blocks[t / BLOCK] * BLOCK + t % BLOCK;
}

/* query . keys, for the LANES positions of one block. */
static inline Vector score_block(const float *restrict query, const float *restrict keys, int64_t dim)
{
    Vector a = {0}, b = {0}, c = {0}, d = {0}; /* four sums: additions to a single one would wait for each other */
    for (int64_t i = 0; i < dim; i += 4, keys += 4 * LANES) {
        a += query[i] * load(keys);
        b += query[i + 1] * load(keys + LANES);
        c += query[i + 2] * load(keys + 2 * LANES);
        d += query[i + 3] * load(keys + 3 * LANES);
    }
    return (a + b) + (c + d);
}

/* out += weight . values, for the LANES positions of one block, whose values are `stride` apart. */
static inline void mix_block(const float *restrict weight, const float *restrict values, int64_t stride,
                             int64_t dim, float *restrict out)
{
    for (int64_t i = 0; i < dim; i += LANES) {
        const float *v = values + i;
        Vector a = load(out + i), b = weight[1] * load(v + stride);
        a += weight[0] * load(v);
        for (int64_t t = 2; t < LANES; t += 2) {
            a += weight[t] * load(v + t * stride);
            b += weight[t + 1] * load(v + (t + 1) * stride);
        }
        store(out + i, a + b);
    }
}

/* Scores of the first `count` positions of a slot by every head, rounded up to LANES with -infinity. */
static inline void score_slot(const Shape *s, const float *restrict query, const float *restrict keys,
                              const int64_t *restrict blocks, int64_t count, float *restrict score, int64_t room)
{
    int64_t dim = s->head_dim, wide = s->kv_heads * dim, group = s->heads / s->kv_heads;
    for (int64_t t = 0; t < count; t += LANES) {
        const float *here = keys + place(blocks, t) * wide;
        for (int64_t h = 0; h < s->heads; h++) {
            Vector block = score_block(query + h * dim, here + h / group * dim * LANES, dim);
            if (t + LANES > count)
                block = choose(LANE < (int32_t)(count - t), block, (Vector){0} - INFINITY);
            store(score + h * room + t, block);
        }
    }
}

/* out += weights . values, over the first `count` positions of a slot, for every head. */
static inline void mix_slot(const Shape *s, const float *restrict weight, const float *restrict values,
                            const int64_t *restrict blocks, int64_t count, float *restrict out, int64_t room)
{
    int64_t dim = s->head_dim, wide = s->kv_heads * dim, group = s->heads / s->kv_heads;
    for (int64_t t = 0; t < count; t += LANES) {
        const float *here = values + place(blocks, t) * wide;
        for (int64_t h = 0; h < s->heads; h++)
            mix_block(weight + h * room + t, here + h / group * dim, wide, dim, out + h * dim);
    }
}

/* Token a follows the first prefix_A[a] positions of slot prompt_A[a] of `prompts` and the first at_A[a] of slot
 * slot_A[a] of `own`: write its key and value to `own`, and let it attend to these positions and to itself. Tokens of
 * one slot are in order of position. qkv: [n][heads + 2 kv_heads][head_dim]; cos and sin: [positions][head_dim];
 * score: [heads][room], where room is the number of positions of the blocks of both; out: [n][heads][head_dim]. */
void attend(const Shape *s, const Store *prompts, const Store *own, const float *restrict qkv,
            const float *restrict q_norm, const float *restrict k_norm, const float *restrict cos,
            const float *restrict sin, const int64_t *restrict prompt_A, const int64_t *restrict prefix_A,
            const int64_t *restrict slot_A, const int64_t *restrict at_A, float *restrict score,
            float *restrict out, int64_t n)
{
    int64_t dim = s->head_dim, heads = s->heads, wide = s->kv_heads * dim;
    int64_t room = (prompts->columns + own->columns) * BLOCK;
    float query[heads * dim], key[dim];
    for (int64_t a = 0; a < n; a++, qkv += heads * dim + 2 * wide, out += heads * dim) {
        int64_t at = at_A[a], lane = at % LANES, prefix = prefix_A[a];
        const float *turn = cos + (prefix + at) * dim, *lift = sin + (prefix + at) * dim;
        const int64_t *past = prompts->table + prompt_A[a] * prompts->columns;
        const int64_t *here = own->table + slot_A[a] * own->columns;
        float *keys = own->keys + place(here, at - lane) * wide, *values = own->values + place(here, at) * wide;
        for (int64_t kv = 0; kv < s->kv_heads; kv++) {
            rotate(qkv + (heads + kv) * dim, k_norm, turn, lift, s, key);
            for (int64_t i = 0; i < dim; i++)
                keys[(kv * dim + i) * LANES + lane] = key[i];
        }
        memcpy(values, qkv + heads * dim + wide, sizeof(float) * wide);
        if (lane == 0) /* old values in the rest of the block have weight 0, but may not be finite */
            memset(values + wide, 0, sizeof(float) * (LANES - 1) * wide);
        for (int64_t h = 0; h < heads; h++)
            rotate(qkv + h * dim, q_norm, turn, lift, s, query + h * dim);
        float *score_own = score + (prefix + LANES - 1) / LANES * LANES;
        score_slot(s, query, prompts->keys, past, prefix, score, room);
        score_slot(s, query, own->keys, here, at + 1, score_own, room);
        for (int64_t h = 0; h < heads; h++)
            softmax(score + h * room, score_own - score + at - lane + LANES, s->scale);
        memset(out, 0, sizeof(float) * heads * dim);
        mix_slot(s, score, prompts->values, past, prefix, out, room);
        mix_slot(s, score_own, own->values, here, at + 1, out, room);
    }
}
