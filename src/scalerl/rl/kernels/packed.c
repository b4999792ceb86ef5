/* The non-GEMM kernels of the training pass of a dense model over packed tokens; called by packed.py.
 *
 * All arrays are float32 and row-major; sizes of heads, hidden states and gates are multiples of LANES. Every sum
 * is computed in a fixed order, so that a result depends only on its arguments.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

/* out = x * rate * weight with rate = 1 / sqrt(mean(x^2) + eps), row by row; row r has the weights r % kinds. */
void rms_norm(const float *restrict x, const float *restrict weight, float eps, float *restrict out,
              float *restrict rate, int64_t n, int64_t dim, int64_t kinds)
{
    for (int64_t row = 0; row < n; row++, x += dim, out += dim) {
        const float *w = weight + row % kinds * dim;
        Vector squares = {0};
        for (int64_t i = 0; i < dim; i += LANES)
            squares += load(x + i) * load(x + i);
        rate[row] = 1.0f / sqrtf(total(squares) / (float)dim + eps);
        for (int64_t i = 0; i < dim; i += LANES)
            store(out + i, load(x + i) * rate[row] * load(w + i));
    }
}

/* With n = x * rate and g = grad * weight: grad_x = rate (g - n mean(g n)); grad_weight += grad * n. */
void rms_norm_backward(const float *restrict grad, const float *restrict x, const float *restrict weight,
                       const float *restrict rate, float *restrict grad_x, float *restrict grad_weight, int64_t n,
                       int64_t dim, int64_t kinds)
{
    for (int64_t row = 0; row < n; row++, grad += dim, x += dim, grad_x += dim) {
        const float *w = weight + row % kinds * dim;
        float *grad_w = grad_weight + row % kinds * dim, by = rate[row];
        Vector along = {0};
        for (int64_t i = 0; i < dim; i += LANES)
            along += load(grad + i) * load(w + i) * load(x + i);
        float mean = total(along) * by / (float)dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            Vector normed = load(x + i) * by, g = load(grad + i);
            store(grad_x + i, by * (g * load(w + i) - normed * mean));
            store(grad_w + i, load(grad_w + i) + g * normed);
        }
    }
}

/* silu' = s + silu (1 - s) with s = 1 / (1 + exp(-gate)). */
void swiglu_backward(const float *restrict grad, const float *restrict gate_up, float *restrict grad_gate_up,
                     int64_t n, int64_t dim)
{
    for (int64_t row = 0; row < n; row++, grad += dim, gate_up += 2 * dim, grad_gate_up += 2 * dim)
        for (int64_t i = 0; i < dim; i += LANES) {
            Vector gate = load(gate_up + i), up = load(gate_up + dim + i), g = load(grad + i);
            Vector s = 1.0f / (1.0f + exp_of(-gate)), silu = gate * s;
            store(grad_gate_up + i, g * up * (s + silu * (1.0f - s)));
            store(grad_gate_up + dim + i, g * silu);
        }
}

/* Prompts and, for each, the completions first[u] .. first[u + 1] that read it; offsets are in packed tokens. */
typedef struct {
    int64_t heads, kv_heads, head_dim, n_prompts;
    const int64_t *prompt_start, *prompt_length, *first, *start, *length;
    const float *cos, *sin; /* [position][head_dim]; only the first half of each row is read */
    float *room;            /* see `lay_out` */
    int64_t extent;         /* positions in the room, a multiple of LANES */
    float scale;
} Attention;

/* Rotated keys and values of one sequence and one key head, by position and by dimension, and their gradients. */
typedef struct {
    float *k, *v, *grad_k, *grad_v; /* [extent][head_dim] */
    float *k_t, *v_t;               /* [head_dim][extent] */
    float *score, *grad_score;      /* [extent] */
    float *query, *grad_query;      /* [head_dim] */
} Room;

static Room lay_out(const Attention *a)
{
    int64_t size = a->extent * a->head_dim;
    float *r = a->room, *rest = r + 6 * size;
    Room room = {r,
                 r + size,
                 r + 2 * size,
                 r + 3 * size,
                 r + 4 * size,
                 r + 5 * size,
                 rest,
                 rest + a->extent,
                 rest + 2 * a->extent,
                 rest + 2 * a->extent + a->head_dim};
    return room;
}

/* Rotate a head by its position; with sign -1 by the transpose, which maps a gradient back. */
static inline void turn(const float *restrict x, const Attention *a, int64_t position, float sign,
                        float *restrict out)
{
    int64_t half = a->head_dim / 2;
    const float *cos = a->cos + position * a->head_dim, *sin = a->sin + position * a->head_dim;
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - sign * x[half + i] * sin[i];
        out[half + i] = x[half + i] * cos[i] + sign * x[i] * sin[i];
    }
}

/* Fill the room with keys and values of `n` tokens at the positions from `at` on. */
static void fill(const Attention *a, const Room *room, const float *restrict qkv, int64_t kv, int64_t n, int64_t at)
{
    int64_t dim = a->head_dim, width = (a->heads + 2 * a->kv_heads) * dim;
    const float *k = qkv + (a->heads + kv) * dim, *v = k + a->kv_heads * dim;
    for (int64_t t = at; t < at + n; t++, k += width, v += width) {
        turn(k, a, t, 1.0f, room->k + t * dim);
        memcpy(room->v + t * dim, v, sizeof(float) * dim);
        for (int64_t i = 0; i < dim; i++) {
            room->k_t[i * a->extent + t] = room->k[t * dim + i];
            room->v_t[i * a->extent + t] = v[i];
        }
    }
    memset(room->grad_k + at * dim, 0, sizeof(float) * n * dim);
    memset(room->grad_v + at * dim, 0, sizeof(float) * n * dim);
}

/* out[t] = x . columns[:, t] for t < length, and with whatever is in the room up to a multiple of LANES. */
static inline void products(const float *restrict x, const float *restrict columns, const Attention *a,
                            int64_t length, float *restrict out)
{
    for (int64_t t = 0; t < length; t += LANES) {
        Vector even = {0}, odd = {0}; /* two sums: additions to a single one would wait for each other */
        for (int64_t i = 0; i < a->head_dim; i += 2) {
            even += x[i] * load(columns + i * a->extent + t);
            odd += x[i + 1] * load(columns + (i + 1) * a->extent + t);
        }
        store(out + t, even + odd);
    }
}

/* room->score = softmax(scale * query . keys) over the first `length` positions, and 0 up to a multiple of LANES. */
static inline void weigh(const Attention *a, const Room *room, int64_t length)
{
    float *score = room->score;
    products(room->query, room->k_t, a, length, score);
    for (int64_t t = length; t % LANES; t++)
        score[t] = -INFINITY;
    softmax(score, (length + LANES - 1) / LANES * LANES, a->scale);
}

/* out = sum of weight[t] * rows[t] over `length` rows. */
static inline void mix(const float *restrict weight, const float *restrict rows, const Attention *a, int64_t length,
                       float *restrict out)
{
    int64_t dim = a->head_dim;
    for (int64_t i = 0; i < dim; i += LANES) {
        Vector even = {0}, odd = {0};
        int64_t t = 0;
        for (; t + 2 <= length; t += 2) {
            even += weight[t] * load(rows + t * dim + i);
            odd += weight[t + 1] * load(rows + (t + 1) * dim + i);
        }
        if (t < length)
            even += weight[t] * load(rows + t * dim + i);
        store(out + i, even + odd);
    }
}

/* rows[t] += weight[t] * x */
static inline void spread(const float *restrict weight, const float *restrict x, const Attention *a, int64_t length,
                          float *restrict rows)
{
    int64_t dim = a->head_dim;
    for (int64_t i = 0; i < dim; i += LANES) {
        Vector part = load(x + i);
        for (int64_t t = 0; t < length; t++)
            store(rows + t * dim + i, load(rows + t * dim + i) + weight[t] * part);
    }
}

/* Attention of the queries of `n` tokens at the positions from `at` on; out: [token][heads][head_dim]. */
static void attend(const Attention *a, const Room *room, const float *restrict qkv, int64_t kv, int64_t n,
                   int64_t at, float *restrict out)
{
    int64_t dim = a->head_dim, group = a->heads / a->kv_heads, width = (a->heads + 2 * a->kv_heads) * dim;
    for (int64_t t = at; t < at + n; t++, qkv += width, out += a->heads * dim)
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            turn(qkv + h * dim, a, t, 1.0f, room->query);
            weigh(a, room, t + 1);
            mix(room->score, room->v, a, t + 1, out + h * dim);
        }
}

/* Gradients of these queries; those of keys and values are accumulated in the room. */
static void attend_backward(const Attention *a, const Room *room, const float *restrict grad,
                            const float *restrict qkv, int64_t kv, int64_t n, int64_t at, float *restrict grad_qkv)
{
    int64_t dim = a->head_dim, group = a->heads / a->kv_heads, width = (a->heads + 2 * a->kv_heads) * dim;
    for (int64_t t = at; t < at + n; t++, qkv += width, grad_qkv += width, grad += a->heads * dim)
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            int64_t length = t + 1;
            turn(qkv + h * dim, a, t, 1.0f, room->query);
            weigh(a, room, length);
            products(grad + h * dim, room->v_t, a, length, room->grad_score);
            for (int64_t s = length; s % LANES; s++)
                room->grad_score[s] = 0.0f; /* a longer completion may have left values there */
            Vector along = {0};
            for (int64_t s = 0; s < length; s += LANES)
                along += load(room->score + s) * load(room->grad_score + s);
            float mean = total(along);
            for (int64_t s = 0; s < length; s += LANES) {
                Vector weight = load(room->score + s) * a->scale;
                store(room->grad_score + s, weight * (load(room->grad_score + s) - mean));
            }
            mix(room->grad_score, room->k, a, length, room->grad_query);
            turn(room->grad_query, a, t, -1.0f, grad_qkv + h * dim);
            spread(room->grad_score, room->query, a, length, room->grad_k);
            spread(room->score, grad + h * dim, a, length, room->grad_v);
        }
}

/* Write the gradients of keys and values from the room to grad_qkv. */
static void give(const Attention *a, const Room *room, int64_t kv, int64_t n, int64_t at, float *restrict grad_qkv)
{
    int64_t dim = a->head_dim, width = (a->heads + 2 * a->kv_heads) * dim;
    float *k = grad_qkv + (a->heads + kv) * dim, *v = k + a->kv_heads * dim;
    for (int64_t t = at; t < at + n; t++, k += width, v += width) {
        turn(room->grad_k + t * dim, a, t, -1.0f, k);
        memcpy(v, room->grad_v + t * dim, sizeof(float) * dim);
    }
}

/* Causal attention with rotary positions: every prompt by itself, every completion after its prompt.
 * qkv: [token][heads + 2 kv_heads][head_dim]; out: [token][heads][head_dim]. */
void attention(const Attention *a, const float *restrict qkv, float *restrict out)
{
    Room room = lay_out(a);
    int64_t width = (a->heads + 2 * a->kv_heads) * a->head_dim, out_width = a->heads * a->head_dim;
    for (int64_t u = 0; u < a->n_prompts; u++)
        for (int64_t kv = 0; kv < a->kv_heads; kv++) {
            int64_t from = a->prompt_start[u], n = a->prompt_length[u];
            fill(a, &room, qkv + from * width, kv, n, 0);
            attend(a, &room, qkv + from * width, kv, n, 0, out + from * out_width);
            for (int64_t m = a->first[u]; m < a->first[u + 1]; m++) {
                int64_t own = a->start[m];
                fill(a, &room, qkv + own * width, kv, a->length[m], n);
                attend(a, &room, qkv + own * width, kv, a->length[m], n, out + own * out_width);
            }
        }
}

/* grad_qkv from the gradient of `out`; gradients of a prompt's keys and values are summed over completions. */
void attention_backward(const Attention *a, const float *restrict grad, const float *restrict qkv,
                        float *restrict grad_qkv)
{
    Room room = lay_out(a);
    int64_t width = (a->heads + 2 * a->kv_heads) * a->head_dim, out_width = a->heads * a->head_dim;
    for (int64_t u = 0; u < a->n_prompts; u++)
        for (int64_t kv = 0; kv < a->kv_heads; kv++) {
            int64_t from = a->prompt_start[u], n = a->prompt_length[u];
            const float *of = qkv + from * width, *asked = grad + from * out_width;
            fill(a, &room, of, kv, n, 0);
            attend_backward(a, &room, asked, of, kv, n, 0, grad_qkv + from * width);
            for (int64_t m = a->first[u]; m < a->first[u + 1]; m++) {
                int64_t own = a->start[m], length = a->length[m];
                of = qkv + own * width, asked = grad + own * out_width;
                fill(a, &room, of, kv, length, n);
                attend_backward(a, &room, asked, of, kv, length, n, grad_qkv + own * width);
                give(a, &room, kv, length, n, grad_qkv + own * width);
            }
            give(a, &room, kv, n, 0, grad_qkv + from * width);
        }
}
