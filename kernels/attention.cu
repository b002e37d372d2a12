// Attention of each head: softmax(scale q k' + mask) v, and its derivatives, in one pass over tiles of keys (the running
// maximum of Milakov and Gimelshein, arXiv 1805.02867; the tiling of Dao et al., arXiv 2205.14135).  Nothing of size
// queries x keys is stored: the derivatives compute scores again.
//
// A block of 128 threads has ROWS queries of one head against tiles of COLS keys (or the other way round).  Thread
// (y, x) of 8 x 16 has the scores of queries y, y + 8, ... and keys x, x + 16, ...; sums over keys are taken in that order,
// which the shape alone fixes.
//
// Macros: T, the storage type; M, that of the mask; KD and WD, the widths of keys and values rounded up to multiples of
// 16; ROWS and COLS; DROP: whether weights are dropped.
#include "drawn.cuh"
#include "reduce.cuh"

#ifndef T
#define T tg_float32
#endif
#ifndef M
#define M tg_bool
#endif
#ifndef KD
#define KD 64
#endif
#ifndef WD
#define WD 64
#endif
#ifndef ROWS
#define ROWS 32
#endif
#ifndef COLS
#define COLS 32
#endif
#ifndef DROP
#define DROP 0
#endif

typedef tg_wide<T>::type W;

constexpr int TG_X = 16, TG_Y = 8, TG_THREADS = TG_X * TG_Y;
constexpr int TG_I = ROWS / TG_Y, TG_J = COLS / TG_X;
constexpr int TG_VEC = 16 / sizeof(W);                       // elements of 16 bytes
constexpr int TG_KP = KD + TG_VEC, TG_WP = WD + TG_VEC;      // pitches: rows of a tile begin in different banks
constexpr int TG_PP = COLS + 1;
// Blocks that a multiprocessor must have room for: without the hint the compiler aims at more, and spills.
constexpr int TG_LEAST_BLOCKS = sizeof(W) == 8 || DROP ? 2 : 3;
static_assert(ROWS % TG_Y == 0 && COLS % TG_X == 0 && KD % TG_X == 0 && WD % TG_X == 0, "whole tiles");

// How the operands lie: steps in elements along examples, positions and heads; their lengths; what weights are made with.
struct tg_lies {
    long long q[3], k[3], v[3], g[3], u[4], mask[4];
    long long n;
    int t, s, heads, groups, width, features;
    unsigned long long key[2], counter;
    double scale, inflation;
    long long threshold;
    int causal, masked, mean;  // masked: 0 no, 1 true where a query may look, 2 numbers to add; mean: what a query gets
                               // that may look nowhere: the mean of all values, or 0
    int of;                    // the operand of the tangent: 0 q, 1 k, 3 mask
    int pulled;                // bit i: operand i's cotangent is asked for

    // Whether keys behind a tile's last query need no look.
    TG_INLINE bool cut() const { return causal && !(masked && mean); }
};

// Where a block is: an example, a head of queries, its group, and the first position of its tile.
struct tg_place {
    long long n;
    int head, group, first;
    // Blocks of the last tiles begin first: causal ones have most to do.
    TG_INLINE tg_place(const tg_lies& lies, int length, int heads, int tile) {
        const int tiles = (length + tile - 1) / tile, b = static_cast<int>(blockIdx.x);
        first = (tiles - 1 - b % tiles) * tile;
        head = b / tiles % heads;
        n = b / tiles / heads;
        group = heads == lies.groups ? head : head / (lies.heads / lies.groups);
    }
};

template <int N>
struct __align__(16) tg_quad {
    W at[N];
};

// Rows first, first + 1, ... of a matrix, times a factor, into a tile of shared memory; zeros beyond its end.
template <int LENGTH, int WIDTH>
TG_INLINE void tg_fetch(W* tile, const T* from, long long step, int first, int rows, int width,
                        W factor) {
    constexpr int PACK = 16 / sizeof(T), PITCH = WIDTH + TG_VEC;
    const bool packed = reinterpret_cast<unsigned long long>(from) % 16 == 0 && step % PACK == 0 && width % PACK == 0;
    if (packed) {
        for (int i = threadIdx.x; i < LENGTH * (WIDTH / PACK); i += TG_THREADS) {
            const int r = i / (WIDTH / PACK), c = i % (WIDTH / PACK) * PACK;
            W* to = tile + r * PITCH + c;
            if (first + r < rows && c < width) {
                const tg_pack<T, PACK> values = tg_load_pack<PACK>(from + static_cast<long long>(first + r) * step + c);
#pragma unroll
                for (int p = 0; p < PACK; ++p) to[p] = tg_load(values.at[p]) * factor;
            } else {
#pragma unroll
                for (int p = 0; p < PACK; ++p) to[p] = W(0);
            }
        }
    } else {
        for (int i = threadIdx.x; i < LENGTH * WIDTH; i += TG_THREADS) {
            const int r = i / WIDTH, c = i % WIDTH;
            const bool there = first + r < rows && c < width;
            tile[r * PITCH + c] = there ? tg_load(from[static_cast<long long>(first + r) * step + c]) * factor : W(0);
        }
    }
}

// Inner products of rows y, y + 8, ... of one tile with rows x, x + 16, ... of another.
template <int WIDTH>
TG_INLINE void tg_dots(const W* a, const W* b, W (&out)[TG_I][TG_J]) {
    constexpr int PITCH = WIDTH + TG_VEC;
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < TG_J; ++j) out[i][j] = W(0);
#pragma unroll 1
    for (int c = 0; c < WIDTH; c += TG_VEC) {
        tg_quad<TG_VEC> left[TG_I], right[TG_J];
#pragma unroll
        for (int i = 0; i < TG_I; ++i) {
            left[i] = *reinterpret_cast<const tg_quad<TG_VEC>*>(a + (y + TG_Y * i) * PITCH + c);
        }
#pragma unroll
        for (int j = 0; j < TG_J; ++j) {
            right[j] = *reinterpret_cast<const tg_quad<TG_VEC>*>(b + (x + TG_X * j) * PITCH + c);
        }
#pragma unroll
        for (int e = 0; e < TG_VEC; ++e)
#pragma unroll
            for (int i = 0; i < TG_I; ++i)
#pragma unroll
                for (int j = 0; j < TG_J; ++j) out[i][j] = fma(left[i].at[e], right[j].at[e], out[i][j]);
    }
}

// out += p b: p is a tile of scores, b has a row for each of its columns.
template <int WIDTH>
TG_INLINE void tg_rows_times(const W* p, const W* b, W (&out)[TG_I][WIDTH / TG_X]) {
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
#pragma unroll 2
    for (int c = 0; c < COLS; ++c) {
        W left[TG_I];
#pragma unroll
        for (int i = 0; i < TG_I; ++i) left[i] = p[(y + TG_Y * i) * TG_PP + c];
#pragma unroll
        for (int j = 0; j < WIDTH / TG_X; ++j) {
            const W right = b[c * (WIDTH + TG_VEC) + x + TG_X * j];
#pragma unroll
            for (int i = 0; i < TG_I; ++i) out[i][j] = fma(left[i], right, out[i][j]);
        }
    }
}

// out += p' b: b has a row for each of the rows of p.
template <int WIDTH>
TG_INLINE void tg_columns_times(const W* p, const W* b, W (&out)[COLS / TG_Y][WIDTH / TG_X]) {
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
#pragma unroll 2
    for (int r = 0; r < ROWS; ++r) {
        W left[COLS / TG_Y];
#pragma unroll
        for (int i = 0; i < COLS / TG_Y; ++i) left[i] = p[r * TG_PP + y + TG_Y * i];
#pragma unroll
        for (int j = 0; j < WIDTH / TG_X; ++j) {
            const W right = b[r * (WIDTH + TG_VEC) + x + TG_X * j];
#pragma unroll
            for (int i = 0; i < COLS / TG_Y; ++i) out[i][j] = fma(left[i], right, out[i][j]);
        }
    }
}

// Rows first, ... of sums times a factor into a C-contiguous array (n, rows, heads, width) or one that steps so.
template <int LENGTH, int WIDTH>
TG_INLINE void tg_deliver(T* to, long long step, int first, int rows, int width,
                          const W (&sums)[LENGTH / TG_Y][WIDTH / TG_X], W factor) {
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
#pragma unroll
    for (int i = 0; i < LENGTH / TG_Y; ++i) {
        const int row = first + y + TG_Y * i;
#pragma unroll
        for (int j = 0; j < WIDTH / TG_X; ++j) {
            const int column = x + TG_X * j;
            if (row < rows && column < width) to[static_cast<long long>(row) * step + column] = tg_store<T>(sums[i][j] * factor);
        }
    }
}

template <int A, int B>
TG_INLINE void tg_clear(W (&sums)[A][B]) {
#pragma unroll
    for (int i = 0; i < A; ++i)
#pragma unroll
        for (int j = 0; j < B; ++j) sums[i][j] = W(0);
}

// ---- one score

// Below every score of a key that a query may see; a row's maximum begins at it, so that exp(-inf - maximum) is 0.
TG_INLINE W tg_least() { return sizeof(W) == 4 ? W(-3.4028234663852886e38f) : W(-1.7976931348623157e308); }
// The score of a key that a query must not see: where such a query gets a mean, all are alike.
TG_INLINE W tg_hidden(const tg_lies& lies) { return lies.mean ? W(-1e30f) : W(-INFINITY); }
TG_INLINE bool tg_blind(const tg_lies& lies, W most) { return lies.mean && most <= W(-1e30f); }

TG_INLINE W tg_mask_value(const M* mask, const long long (&step)[4], long long n, int head, int row,
                          int column) {
    return static_cast<W>(tg_load(mask[n * step[0] + head * step[1] + row * step[2] + column * step[3]]));
}

// The score of a query and a key, which may be hidden from it.
TG_INLINE W tg_score(W x, const M* mask, const tg_lies& lies, const tg_place& at, int row, int column) {
    if (row >= lies.t || column >= lies.s) return W(-INFINITY);
    if (lies.causal && column > row) return tg_hidden(lies);
    if (lies.masked) {
        const W value = tg_mask_value(mask, lies.mask, at.n, at.head, row, column);
        if (lies.masked == 1) return value != W(0) ? x : tg_hidden(lies);
        x += value;
        if (lies.mean && x < tg_hidden(lies)) x = tg_hidden(lies);
    }
    return x;
}

// The scores of a tile, where some keys may be hidden; most tiles have none.
TG_INLINE void tg_hide(W (&scores)[TG_I][TG_J], const M* mask, const tg_lies& lies, const tg_place& at, int top, int left) {
    const bool inside = top + ROWS <= lies.t && left + COLS <= lies.s;
    if (inside && !lies.masked && !(lies.causal && left + COLS > top + 1)) return;
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < TG_J; ++j) {
            scores[i][j] = tg_score(scores[i][j], mask, lies, at, top + y + TG_Y * i, left + x + TG_X * j);
        }
}

// What a weight is multiplied with: the 16 bits that nn.functional.dropout would draw for it decide.
TG_INLINE W tg_share(const tg_lies& lies, const tg_place& at, int row, int column) {
    if (!DROP) return W(1);
    const unsigned long long e = ((at.n * lies.heads + at.head) * lies.t + row) * lies.s + column;
    const tg_bits16_tile tile(lies.key[0], lies.key[1], lies.counter, e);
    const unsigned long long word = tg_word(tile.block, static_cast<int>(e >> 10 & 3));
    const long long drawn = static_cast<long long>(word >> (16 * (e & 3)) & 0xffff);
    return drawn < lies.threshold ? static_cast<W>(lies.inflation) : W(0);
}

template <class A>
TG_INLINE A tg_over_x(A value, bool largest) {
    return largest ? tg_warp_reduce<tg_maximum<A>, TG_X>(value) : tg_warp_reduce<tg_add<A>, TG_X>(value);
}

TG_INLINE int tg_end(const tg_lies& lies, int first) {
    return lies.cut() && first + ROWS < lies.s ? first + ROWS : lies.s;
}

// ---- forward

extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const M* __restrict__ mask,
                 T* __restrict__ out, const tg_lies lies) {
    TG_DYNAMIC_SHARED(W, memory);
    constexpr int OTHER = COLS * (TG_KP > TG_WP ? TG_KP : TG_WP);
    W *queries = memory, *others = queries + ROWS * TG_KP, *weights = others + OTHER;
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
    const tg_place at(lies, lies.t, lies.heads, ROWS);
    tg_fetch<ROWS, KD>(queries, q + at.n * lies.q[0] + at.head * lies.q[2], lies.q[1], at.first, lies.t, lies.width,
                       static_cast<W>(lies.scale));
    const T* keys = k + at.n * lies.k[0] + at.group * lies.k[2];
    const T* values = v + at.n * lies.v[0] + at.group * lies.v[2];
    W most[TG_I], total[TG_I], result[TG_I][WD / TG_X];
    tg_clear(result);
#pragma unroll
    for (int i = 0; i < TG_I; ++i) most[i] = tg_least(), total[i] = W(0);
    const int end = tg_end(lies, at.first);
    for (int first = 0; first < end; first += COLS) {
        __syncthreads();
        tg_fetch<COLS, KD>(others, keys, lies.k[1], first, lies.s, lies.width, W(1));
        __syncthreads();
        W scores[TG_I][TG_J];
        tg_dots<KD>(queries, others, scores);
        tg_hide(scores, mask, lies, at, at.first, first);
#pragma unroll
        for (int i = 0; i < TG_I; ++i) {
            W next = most[i];
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                next = tg_max(next, scores[i][j]);
            }
            next = tg_over_x(next, true);
            const W factor = exp(most[i] - next);
            most[i] = next;
            total[i] *= factor;
#pragma unroll
            for (int j = 0; j < WD / TG_X; ++j) result[i][j] *= factor;
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                const W weight = exp(scores[i][j] - next);
                total[i] += weight;
                weights[(y + TG_Y * i) * TG_PP + x + TG_X * j] = weight;
            }
        }
        if (DROP) {  // one after the other: all at once would take more registers than there are
#pragma unroll 1
            for (int e = 0; e < TG_I * TG_J; ++e) {
                const int r = y + TG_Y * (e / TG_J), c = x + TG_X * (e % TG_J);
                weights[r * TG_PP + c] *= tg_share(lies, at, at.first + r, first + c);
            }
        }
        __syncthreads();
        tg_fetch<COLS, WD>(others, values, lies.v[1], first, lies.s, lies.features, W(1));
        __syncthreads();
        tg_rows_times<WD>(weights, others, result);
    }
#pragma unroll
    for (int i = 0; i < TG_I; ++i) {
        const W sum = tg_over_x(total[i], false);
        const W factor = sum == W(0) ? W(0) : W(1) / sum;
#pragma unroll
        for (int j = 0; j < WD / TG_X; ++j) result[i][j] *= factor;
    }
    const long long step = static_cast<long long>(lies.heads) * lies.features;
    tg_deliver<ROWS, WD>(out + at.n * lies.t * step + at.head * lies.features, step, at.first, lies.t, lies.features, result,
                         W(1));
}

// ---- backward: first the queries, which leaves each row's largest score, the inverse of its sum and the mean of the
// weights' cotangents in `rows`; then the keys and values

struct tg_tiles {
    W *queries, *cotangents, *keys, *values, *weights, *scores;
    TG_INLINE explicit tg_tiles(W* memory) {
        queries = memory;
        cotangents = queries + ROWS * TG_KP;
        keys = cotangents + ROWS * TG_WP;
        values = keys + COLS * TG_KP;
        weights = values + COLS * TG_WP;
        scores = weights + ROWS * TG_PP;
    }
    TG_INLINE void fetch_rows(const T* q, const T* g, const tg_lies& lies, const tg_place& at, int head,
                              int first) {
        tg_fetch<ROWS, KD>(queries, q + at.n * lies.q[0] + head * lies.q[2], lies.q[1], first, lies.t, lies.width,
                           static_cast<W>(lies.scale));
        tg_fetch<ROWS, WD>(cotangents, g + at.n * lies.g[0] + head * lies.g[2], lies.g[1], first, lies.t, lies.features,
                           W(1));
    }
    TG_INLINE void fetch_columns(const T* k, const T* v, const tg_lies& lies, const tg_place& at, int first) {
        tg_fetch<COLS, KD>(keys, k + at.n * lies.k[0] + at.group * lies.k[2], lies.k[1], first, lies.s, lies.width, W(1));
        tg_fetch<COLS, WD>(values, v + at.n * lies.v[0] + at.group * lies.v[2], lies.v[1], first, lies.s, lies.features,
                           W(1));
    }
};

extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention_vjp_q(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                       const M* __restrict__ mask, const T* __restrict__ g, T* __restrict__ out, W* __restrict__ rows,
                       const tg_lies lies) {
    TG_DYNAMIC_SHARED(W, memory);
    const tg_tiles tiles(memory);
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
    const tg_place at(lies, lies.t, lies.heads, ROWS);
    tg_tiles(memory).fetch_rows(q, g, lies, at, at.head, at.first);
    W most[TG_I], total[TG_I], mean[TG_I];
#pragma unroll
    for (int i = 0; i < TG_I; ++i) most[i] = tg_least(), total[i] = mean[i] = W(0);
    const int end = tg_end(lies, at.first);
    W scores[TG_I][TG_J], back[TG_I][TG_J];
    for (int first = 0; first < end; first += COLS) {
        __syncthreads();
        tg_tiles(memory).fetch_columns(k, v, lies, at, first);
        __syncthreads();
        tg_dots<KD>(tiles.queries, tiles.keys, scores);
        tg_dots<WD>(tiles.cotangents, tiles.values, back);
        tg_hide(scores, mask, lies, at, at.first, first);
#pragma unroll
        for (int i = 0; i < TG_I; ++i) {
            const int row = at.first + y + TG_Y * i;
            W next = most[i];
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                next = tg_max(next, scores[i][j]);
            }
            next = tg_over_x(next, true);
            const W factor = exp(most[i] - next);
            most[i] = next;
            total[i] *= factor;
            mean[i] *= factor;
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                const W weight = exp(scores[i][j] - next);
                total[i] += weight;
                mean[i] += weight * (back[i][j] * tg_share(lies, at, row, first + x + TG_X * j));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < TG_I; ++i) {
        const W sum = tg_over_x(total[i], false);
        total[i] = sum == W(0) ? W(0) : W(1) / sum;
        mean[i] = tg_over_x(mean[i], false) * total[i];
        const int row = at.first + y + TG_Y * i;
        if (x == 0 && row < lies.t) {
            W* to = rows + ((at.n * lies.heads + at.head) * lies.t + row) * 3;
            to[0] = most[i], to[1] = total[i], to[2] = mean[i];
        }
    }
    if (!(lies.pulled & 1)) return;
    W result[TG_I][KD / TG_X];
    tg_clear(result);
    for (int first = 0; first < end; first += COLS) {
        __syncthreads();
        tg_tiles(memory).fetch_columns(k, v, lies, at, first);
        __syncthreads();
        tg_dots<KD>(tiles.queries, tiles.keys, scores);
        tg_dots<WD>(tiles.cotangents, tiles.values, back);
        tg_hide(scores, mask, lies, at, at.first, first);
#pragma unroll
        for (int i = 0; i < TG_I; ++i) {
            const int row = at.first + y + TG_Y * i;
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                const int column = first + x + TG_X * j;
                const W weight = tg_blind(lies, most[i]) ? W(0) : exp(scores[i][j] - most[i]) * total[i];
                tiles.weights[(y + TG_Y * i) * TG_PP + x + TG_X * j] =
                    weight * (back[i][j] * tg_share(lies, at, row, column) - mean[i]);
            }
        }
        __syncthreads();
        tg_rows_times<KD>(tiles.weights, tiles.keys, result);
    }
    const long long step = static_cast<long long>(lies.heads) * lies.width;
    tg_deliver<ROWS, KD>(out + at.n * lies.t * step + at.head * lies.width, step, at.first, lies.t, lies.width, result,
                         static_cast<W>(lies.scale));
}

// The cotangents of a tile of scores, from what tg_attention_vjp_q has left of each row; and its weights, as far as they
// are kept.
TG_INLINE void tg_back(const tg_tiles& tiles, const M* mask, const W* rows, const tg_lies& lies, const tg_place& at,
                       int head, int top, int left, W (&scores)[TG_I][TG_J], W (&back)[TG_I][TG_J]) {
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
    tg_place here = at;
    here.head = head;
    tg_dots<KD>(tiles.queries, tiles.keys, scores);
    tg_dots<WD>(tiles.cotangents, tiles.values, back);
    tg_hide(scores, mask, lies, here, top, left);
#pragma unroll
    for (int i = 0; i < TG_I; ++i) {
        const int row = top + y + TG_Y * i;
        const W* of = rows + ((here.n * lies.heads + head) * lies.t + (row < lies.t ? row : 0)) * 3;
        const W most = of[0], inverse = of[1], mean = of[2];
#pragma unroll
        for (int j = 0; j < TG_J; ++j) {
            const int column = left + x + TG_X * j;
            const W weight = row < lies.t ? exp(scores[i][j] - most) * inverse : W(0);
            const W share = tg_share(lies, here, row, column);
            back[i][j] = tg_blind(lies, most) ? W(0) : weight * (back[i][j] * share - mean);
            scores[i][j] = weight * share;
        }
    }
}

extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention_vjp_kv(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                        const M* __restrict__ mask, const T* __restrict__ g, const W* __restrict__ rows,
                        T* __restrict__ out_k, T* __restrict__ out_v, const tg_lies lies) {
    TG_DYNAMIC_SHARED(W, memory);
    tg_tiles tiles(memory);
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
    const tg_place at(lies, lies.s, lies.groups, COLS);
    tiles.fetch_columns(k, v, lies, at, at.first);
    W result_k[COLS / TG_Y][KD / TG_X], result_v[COLS / TG_Y][WD / TG_X];
    tg_clear(result_k);
    tg_clear(result_v);
    const int each = lies.heads / lies.groups;
    for (int head = at.head * each; head < (at.head + 1) * each; ++head) {
        for (int first = lies.cut() ? at.first / ROWS * ROWS : 0; first < lies.t; first += ROWS) {
            __syncthreads();
            tiles.fetch_rows(q, g, lies, at, head, first);
            __syncthreads();
            W scores[TG_I][TG_J], back[TG_I][TG_J];
            tg_back(tiles, mask, rows, lies, at, head, first, at.first, scores, back);
#pragma unroll
            for (int i = 0; i < TG_I; ++i)
#pragma unroll
                for (int j = 0; j < TG_J; ++j) {
                    tiles.weights[(y + TG_Y * i) * TG_PP + x + TG_X * j] = scores[i][j];
                    tiles.scores[(y + TG_Y * i) * TG_PP + x + TG_X * j] = back[i][j];
                }
            __syncthreads();
            if (lies.pulled & 4) tg_columns_times<WD>(tiles.weights, tiles.cotangents, result_v);
            if (lies.pulled & 2) tg_columns_times<KD>(tiles.scores, tiles.queries, result_k);
        }
    }
    if (lies.pulled & 2) {
        const long long step = static_cast<long long>(lies.groups) * lies.width;
        tg_deliver<COLS, KD>(out_k + at.n * lies.s * step + at.head * lies.width, step, at.first, lies.s, lies.width,
                             result_k, W(1));
    }
    if (lies.pulled & 4) {
        const long long step = static_cast<long long>(lies.groups) * lies.features;
        tg_deliver<COLS, WD>(out_v + at.n * lies.s * step + at.head * lies.features, step, at.first, lies.s, lies.features,
                             result_v, W(1));
    }
}

// The cotangent of the numbers added to scores, summed over what they broadcast along (where `lies.u` is 0), in order.
extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention_vjp_mask(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                          const M* __restrict__ mask, const T* __restrict__ g, const W* __restrict__ rows,
                          T* __restrict__ out, const tg_lies lies) {
    TG_DYNAMIC_SHARED(W, memory);
    tg_tiles tiles(memory);
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
    const bool all_n = !lies.u[0], all_heads = !lies.u[1], all_rows = !lies.u[2], all_columns = !lies.u[3];
    long long b = blockIdx.x;
    const int down = all_rows ? 1 : (lies.t + ROWS - 1) / ROWS, across = all_columns ? 1 : (lies.s + COLS - 1) / COLS;
    const int own_column = b % across * COLS, own_row = b / across % down * ROWS;
    b /= across * down;
    const int own_head = all_heads ? 0 : b % lies.heads, own_n = all_heads ? b : b / lies.heads;
    W sums[TG_I][TG_J];
    tg_clear(sums);
    for (long long n = all_n ? 0 : own_n; n < (all_n ? lies.n : own_n + 1); ++n)
        for (int head = all_heads ? 0 : own_head; head < (all_heads ? lies.heads : own_head + 1); ++head)
            for (int row = own_row; row < (all_rows ? lies.t : own_row + 1); row += ROWS)
                for (int column = own_column; column < (all_columns ? lies.s : own_column + 1); column += COLS) {
                    tg_place at(lies, lies.t, lies.heads, ROWS);
                    at.n = n;
                    at.head = head;
                    at.group = head / (lies.heads / lies.groups);
                    __syncthreads();
                    tiles.fetch_rows(q, g, lies, at, head, row);
                    tiles.fetch_columns(k, v, lies, at, column);
                    __syncthreads();
                    W scores[TG_I][TG_J], back[TG_I][TG_J];
                    tg_back(tiles, mask, rows, lies, at, head, row, column, scores, back);
#pragma unroll
                    for (int i = 0; i < TG_I; ++i)
#pragma unroll
                        for (int j = 0; j < TG_J; ++j) sums[i][j] += back[i][j];
                }
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < TG_J; ++j) tiles.weights[(y + TG_Y * i) * TG_PP + x + TG_X * j] = sums[i][j];
    __syncthreads();
    const int height = all_rows ? 1 : ROWS, length = all_columns ? 1 : COLS;
    for (int e = threadIdx.x; e < height * length; e += TG_THREADS) {
        const int r = e / length, c = e % length;
        W sum = W(0);
        for (int i = r; i < (all_rows ? ROWS : r + 1); ++i)
            for (int j = c; j < (all_columns ? COLS : c + 1); ++j) sum += tiles.weights[i * TG_PP + j];
        if (own_row + r < (all_rows ? 1 : lies.t) && own_column + c < (all_columns ? 1 : lies.s)) {
            out[own_n * lies.u[0] + own_head * lies.u[1] + (own_row + r) * lies.u[2] + (own_column + c) * lies.u[3]] =
                tg_store<T>(sum);
        }
    }
}

// ---- forward mode: along the tangent u of operand OF (0 q, 1 k, 3 mask)

extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention_jvp(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                     const M* __restrict__ mask, const T* __restrict__ u, T* __restrict__ out, const tg_lies lies) {
    TG_DYNAMIC_SHARED(W, memory);
    W *queries = memory, *tangents = queries + ROWS * TG_KP, *keys = tangents + (lies.of == 1 ? COLS : ROWS) * TG_KP;
    W *weights = keys + COLS * (TG_KP > TG_WP ? TG_KP : TG_WP), *moved = weights + ROWS * TG_PP;
    const int x = threadIdx.x % TG_X, y = threadIdx.x / TG_X;
    const tg_place at(lies, lies.t, lies.heads, ROWS);
    const W scale = static_cast<W>(lies.scale);
    tg_fetch<ROWS, KD>(queries, q + at.n * lies.q[0] + at.head * lies.q[2], lies.q[1], at.first, lies.t, lies.width, scale);
    if (lies.of == 0) {
        tg_fetch<ROWS, KD>(tangents, u + at.n * lies.u[0] + at.head * lies.u[2], lies.u[1], at.first, lies.t, lies.width,
                           scale);
    }
    W most[TG_I], total[TG_I], mean[TG_I], result[TG_I][WD / TG_X], by[TG_I][WD / TG_X];
    tg_clear(result);
    tg_clear(by);
#pragma unroll
    for (int i = 0; i < TG_I; ++i) most[i] = tg_least(), total[i] = mean[i] = W(0);
    const int end = tg_end(lies, at.first);
    for (int first = 0; first < end; first += COLS) {
        __syncthreads();
        tg_fetch<COLS, KD>(keys, k + at.n * lies.k[0] + at.group * lies.k[2], lies.k[1], first, lies.s, lies.width, W(1));
        if (lies.of == 1) {
            tg_fetch<COLS, KD>(tangents, u + at.n * lies.u[0] + at.group * lies.u[2], lies.u[1], first, lies.s, lies.width,
                               W(1));
        }
        __syncthreads();
        W scores[TG_I][TG_J], along[TG_I][TG_J];
        tg_dots<KD>(queries, keys, scores);
        tg_hide(scores, mask, lies, at, at.first, first);
        if (lies.of == 0) tg_dots<KD>(tangents, keys, along);
        if (lies.of == 1) tg_dots<KD>(queries, tangents, along);
#pragma unroll
        for (int i = 0; i < TG_I; ++i) {
            const int row = at.first + y + TG_Y * i;
            W next = most[i];
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                const int column = first + x + TG_X * j;
                if (lies.of == 3) {
                    const bool there = row < lies.t && column < lies.s;
                    const long long place = at.n * lies.u[0] + at.head * lies.u[1] + row * lies.u[2] + column * lies.u[3];
                    along[i][j] = there ? tg_load(u[place]) : W(0);
                }
                next = tg_max(next, scores[i][j]);
            }
            next = tg_over_x(next, true);
            const W factor = exp(most[i] - next);
            most[i] = next;
            total[i] *= factor;
            mean[i] *= factor;
#pragma unroll
            for (int j = 0; j < WD / TG_X; ++j) result[i][j] *= factor, by[i][j] *= factor;
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                const W weight = exp(scores[i][j] - next);
                const W share = tg_share(lies, at, row, first + x + TG_X * j);
                total[i] += weight;
                mean[i] += weight * along[i][j];
                weights[(y + TG_Y * i) * TG_PP + x + TG_X * j] = weight * share;
                moved[(y + TG_Y * i) * TG_PP + x + TG_X * j] = weight * share * along[i][j];
            }
        }
        __syncthreads();
        tg_fetch<COLS, WD>(keys, v + at.n * lies.v[0] + at.group * lies.v[2], lies.v[1], first, lies.s, lies.features, W(1));
        __syncthreads();
        tg_rows_times<WD>(moved, keys, result);
        tg_rows_times<WD>(weights, keys, by);
    }
#pragma unroll
    for (int i = 0; i < TG_I; ++i) {
        const W sum = tg_over_x(total[i], false);
        const W inverse = sum == W(0) || tg_blind(lies, most[i]) ? W(0) : W(1) / sum;
        const W shift = tg_over_x(mean[i], false) * inverse;
#pragma unroll
        for (int j = 0; j < WD / TG_X; ++j) result[i][j] = (result[i][j] - shift * by[i][j]) * inverse;
    }
    const long long step = static_cast<long long>(lies.heads) * lies.features;
    tg_deliver<ROWS, WD>(out + at.n * lies.t * step + at.head * lies.features, step, at.first, lies.t, lies.features, result,
                         W(1));
}
