// What the kernels of attention share: softmax(scale q k' + mask) v of each head, and its derivatives, over tiles of
// scores (the running maximum of Milakov and Gimelshein, arXiv 1805.02867; the tiling of Dao et al., arXiv 2205.14135).
// Nothing of size queries x keys is stored: the derivatives compute scores again.
//
// A block has ROWS queries of one head against tiles of COLS keys, or (TURNED) ROWS keys against tiles of COLS queries.
// Sums are taken in an order that the shape alone fixes.
//
// Macros beside those of attention_tiles.cuh: M, the type of the mask; KD and WD, the widths of keys and values rounded
// up to whole fragments; DROP: whether weights are dropped.
#pragma once

#include "attention_tiles.cuh"
#include "drawn.cuh"

#ifndef M
#define M tg_bool
#endif
#ifndef KD
#define KD 64
#endif
#ifndef WD
#define WD 64
#endif
#ifndef DROP
#define DROP 0
#endif

// Blocks that a multiprocessor must have room for: without the hint the compiler aims at more, and spills.
constexpr int TG_LEAST_BLOCKS = sizeof(W) == 8 || DROP || TENSOR ? 2 : 3;

// How the operands lie: steps in elements along examples, positions and heads; their lengths; what weights are made
// with.
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
    TG_INLINE tg_place(const tg_lies& lies, int length, int heads) {
        const int tiles = (length + ROWS - 1) / ROWS, b = static_cast<int>(blockIdx.x);
        first = (tiles - 1 - b % tiles) * ROWS;
        head = b / tiles % heads;
        n = b / tiles / heads;
        group = heads == lies.groups ? head : head / (lies.heads / lies.groups);
    }
};

template <class A>
TG_INLINE A* tg_head(A* x, const long long (&steps)[3], long long n, int head) {
    return x + n * steps[0] + head * steps[2];
}

// Queries and their cotangents, or keys and values: two tiles of the same rows.
template <int LENGTH>
struct tg_both {
    E *k, *w;  // of width KD and WD
    TG_INLINE explicit tg_both(tg_room& room) : k(room.tile(LENGTH, KD)), w(room.tile(LENGTH, WD)) {}
    TG_INLINE void fetch(const T* of_k, long long step_k, const T* of_w, long long step_w, const tg_lies& lies,
                         int first, int rows) const {
        tg_fetch<LENGTH, KD>(k, of_k, step_k, first, rows, lies.width);
        tg_fetch<LENGTH, WD>(w, of_w, step_w, first, rows, lies.features);
    }
    TG_INLINE void keys(const T* of_k, const T* of_v, const tg_lies& lies, const tg_place& at, int first) const {
        fetch(tg_head(of_k, lies.k, at.n, at.group), lies.k[1], tg_head(of_v, lies.v, at.n, at.group), lies.v[1], lies,
              first, lies.s);
    }
    TG_INLINE void queries(const T* of_q, const T* of_g, const tg_lies& lies, const tg_place& at, int first) const {
        fetch(tg_head(of_q, lies.q, at.n, at.head), lies.q[1], tg_head(of_g, lies.g, at.n, at.head), lies.g[1], lies,
              first, lies.t);
    }
};

// ---- scores

// Below every score of a key that a query may see; a row's maximum begins at it, so that exp(-inf - maximum) is 0.
TG_INLINE W tg_least() { return sizeof(W) == 4 ? W(-3.4028234663852886e38f) : W(-1.7976931348623157e308); }
// The score of a key that a query must not see: where such a query gets a mean, all are alike.
TG_INLINE W tg_hidden(const tg_lies& lies) { return lies.mean ? W(-1e30f) : W(-INFINITY); }
TG_INLINE bool tg_blind(const tg_lies& lies, W most) { return lies.mean && most <= W(-1e30f); }

// Element (query, key) of a mask, or of its tangent.
template <class A>
TG_INLINE W tg_added(const A* mask, const long long (&step)[4], const tg_place& at, int query, int key) {
    return static_cast<W>(tg_load(mask[at.n * step[0] + at.head * step[1] + query * step[2] + key * step[3]]));
}

// The score of a query and a key, which may be hidden from it.
TG_INLINE W tg_score(W x, const M* mask, const tg_lies& lies, const tg_place& at, int query, int key) {
    if (query >= lies.t || key >= lies.s) return W(-INFINITY);
    if (lies.causal && key > query) return tg_hidden(lies);
    if (lies.masked) {
        const W value = tg_added(mask, lies.mask, at, query, key);
        if (lies.masked == 1) return value != W(0) ? x : tg_hidden(lies);
        x += value;
        if (lies.mean && x < tg_hidden(lies)) x = tg_hidden(lies);
    }
    return x;
}

// The scores of a tile from its first query and key on; most tiles have no keys that are hidden.
template <bool TURNED>
TG_INLINE void tg_scores(const E* own, const E* other, const M* mask, const tg_lies& lies, const tg_place& at,
                         int query, int key, W (&scores)[TG_I][TG_J]) {
    tg_dots<KD>(own, other, scores);
    const W scale = static_cast<W>(lies.scale);
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < TG_J; ++j) scores[i][j] *= scale;
    constexpr int QUERIES = TURNED ? COLS : ROWS, KEYS = TURNED ? ROWS : COLS;
    const bool inside = query + QUERIES <= lies.t && key + KEYS <= lies.s;
    if (inside && !lies.masked && !(lies.causal && key + KEYS > query + 1)) return;
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < TG_J; ++j) {
            const int row = tg_row(i), column = tg_column(j);
            scores[i][j] = tg_score(scores[i][j], mask, lies, at, query + (TURNED ? column : row),
                                    key + (TURNED ? row : column));
        }
}

// Behind the last key that the ROWS queries from `first` on may see.
TG_INLINE int tg_end(const tg_lies& lies, int first) {
    return lies.cut() && first + ROWS < lies.s ? first + ROWS : lies.s;
}

// ---- dropout

// Which weights of a tile are kept: the 16 bits that nn.functional.dropout would draw for each decide.  A word of them
// is for four neighbouring keys: where each row of weights begins with a word, lanes share the words that they draw.
// They are drawn one after the other: all at once would take more registers than there are.
template <bool TURNED>
struct tg_kept {
    unsigned long long bits;
    W inflation;
    TG_INLINE tg_kept(const tg_lies& lies, const tg_place& at, int query, int key) {
        static_assert(!DROP || TG_I * TG_J <= 64, "a bit for each");
        if (!DROP) return;
        bits = 0;
        inflation = static_cast<W>(lies.inflation);
        if (SHARED && lies.s % 4 == 0) {
            share_words(lies, at, query, key);
            return;
        }
#pragma unroll 1
        for (int b = 0; b < TG_I * TG_J; ++b) {
            const int row = tg_row(b / TG_J), column = tg_column(b % TG_J);
            const unsigned long long e = number(lies, at, query, key, row, column);
            bits |= static_cast<unsigned long long>(kept(lies, word(lies, e), static_cast<int>(e & 3))) << b;
        }
    }
    // What a weight is multiplied with.
    TG_INLINE W share(int i, int j) const {
        if (!DROP) return W(1);
        return bits >> (i * TG_J + j) & 1 ? inflation : W(0);
    }

  private:
    // TURNED, the four keys of a word are rows: those of a thread's neighbours on tensor cores, of other warps else.
    static constexpr bool SHARED = TENSOR || !TURNED;

    static TG_INLINE unsigned long long number(const tg_lies& lies, const tg_place& at, int query, int key, int row,
                                               int column) {
        query += TURNED ? column : row;
        return ((at.n * lies.heads + at.head) * lies.t + query) * lies.s + key + (TURNED ? row : column);
    }
    static TG_INLINE unsigned long long word(const tg_lies& lies, unsigned long long e) {
        const tg_bits16_tile tile(lies.key[0], lies.key[1], lies.counter, e);
        return tg_word(tile.block, static_cast<int>(e >> 10 & 3));
    }
    static TG_INLINE bool kept(const tg_lies& lies, unsigned long long word, int which) {
        return static_cast<long long>(word >> (16 * which) & 0xffff) < lies.threshold;
    }

    // Draw d of a lane is of a word that WIDTH lanes need; of it remain four bits.
    static constexpr int WIDTH = TURNED ? 32 : TG_LANES, DRAWS = (TG_I * TG_J + 3) / 4;
    TG_INLINE void share_words(const tg_lies& lies, const tg_place& at, int query, int key) {
        const int lane = tg_lane() % WIDTH;
        unsigned long long drawn = 0;
#pragma unroll 1
        for (int d = 0; d < DRAWS; ++d) {
            int row, column;
            if (TURNED) {  // for four columns j and each half of a band's 8 rows
                row = tg_row(d / (TG_J / 4)) - tg_lane() / 4 + lane / 4 % 2 * 4;
                column = tg_column(d % (TG_J / 4) * 4 + lane / 8);
            } else {
                const int n = d * WIDTH + lane;
                row = tg_row(n / (COLS / 4));
                column = n % (COLS / 4) * 4;
            }
            const unsigned long long found = word(lies, number(lies, at, query, key, row, column));
            for (int k = 0; k < 4; ++k) drawn |= static_cast<unsigned long long>(kept(lies, found, k)) << (4 * d + k);
        }
#pragma unroll 1
        for (int b = 0; b < TG_I * TG_J; ++b) {
            const int i = b / TG_J, j = b % TG_J;
            const int n = i * (COLS / 4) + tg_column(j) / 4;  // not TURNED: the number of the word
            const int from = TURNED ? j % 4 * 8 + lane / 16 * 4 + lane % 4 : n % WIDTH;
            const int bit = TURNED ? 4 * (b / 4) + lane / 4 % 4 : 4 * (n / WIDTH) + tg_column(j) % 4;
            bits |= (__shfl_sync(TG_ALL_LANES, drawn, from, WIDTH) >> bit & 1) << b;
        }
    }
};

// ---- the softmax of rows that come tile by tile

struct tg_running {
    W most[TG_I], total[TG_I];  // a row's largest score so far; its lane's part of the sum of exp(score - most)
    TG_INLINE tg_running() {
#pragma unroll
        for (int i = 0; i < TG_I; ++i) most[i] = tg_least(), total[i] = W(0);
    }
    // Scores become exp(score - most); `factor`: what the sums of earlier tiles are multiplied with.
    TG_INLINE void take(W (&scores)[TG_I][TG_J], W (&factor)[TG_I]) {
#pragma unroll
        for (int i = 0; i < TG_I; ++i) {
            W next = most[i];
#pragma unroll
            for (int j = 0; j < TG_J; ++j) next = tg_max(next, scores[i][j]);
            next = tg_row_maximum(next);
            factor[i] = exp(most[i] - next);
            most[i] = next;
            total[i] *= factor[i];
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                scores[i][j] = exp(scores[i][j] - next);
                total[i] += scores[i][j];
            }
        }
    }
    // 1 over the whole sum, 0 for a query that sees no key.
    TG_INLINE void inverse(W (&of)[TG_I]) const {
#pragma unroll
        for (int i = 0; i < TG_I; ++i) {
            const W sum = tg_row_sum(total[i]);
            of[i] = sum == W(0) ? W(0) : W(1) / sum;
        }
    }
};

template <int N>
TG_INLINE void tg_shrink(W (&sums)[TG_I][N], const W (&factor)[TG_I]) {
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j) sums[i][j] *= factor[i];
}

// ---- statistics of queries

// What forward keeps of each query, for the derivative: its largest score, and the inverse of its sum.  Both, since of
// large scores (of a query behind a mask of -1e9, say) the logarithm of their sum rounds to the largest alone.
constexpr int TG_KEPT = 2;
// In shared memory those of a tile's queries, and the mean of their weights' cotangents.
constexpr int TG_STATS = 3;

// The number of a query among those of all heads.
TG_INLINE long long tg_query(const tg_lies& lies, const tg_place& at, int query) {
    return (at.n * lies.heads + at.head) * lies.t + query;
}

TG_INLINE void tg_keep_stats(W* stats, const W (&most)[TG_I], const W (&inverse)[TG_I], const tg_lies& lies,
                             const tg_place& at) {
    if (tg_column(0) != 0 || (TENSOR && threadIdx.x / 32 % SPLIT != 0)) return;  // one lane of each row
#pragma unroll
    for (int i = 0; i < TG_I; ++i) {
        const int query = at.first + tg_row(i);
        if (query >= lies.t) continue;
        W* to = stats + tg_query(lies, at, query) * TG_KEPT;
        to[0] = most[i], to[1] = inverse[i];
    }
}

// Those of `count` queries from `first` on, into shared memory, without means.
TG_INLINE void tg_fetch_kept(W* to, const W* stats, const tg_lies& lies, const tg_place& at, int first, int count) {
    const W* from = stats + tg_query(lies, at, first) * TG_KEPT;
    const int there = (first + count < lies.t ? count : lies.t - first) * TG_KEPT;
    for (int i = threadIdx.x; i < count * TG_KEPT; i += TG_THREADS) {
        to[i / TG_KEPT * TG_STATS + i % TG_KEPT] = i < there ? from[i] : W(0);
    }
}

TG_INLINE void tg_fetch_stats(W* to, const W* stats, const W* means, const tg_lies& lies, const tg_place& at, int first,
                              int count) {
    tg_fetch_kept(to, stats, lies, at, first, count);
    for (int i = threadIdx.x; i < count; i += TG_THREADS) {
        to[i * TG_STATS + 2] = first + i < lies.t ? means[tg_query(lies, at, first + i)] : W(0);
    }
}

// The mean of the cotangents of a query's weights is the inner product of its cotangent and its result, which are as
// wide as values, not as many as keys.  LANES neighbours share a query.
TG_INLINE void tg_take_means(W* to, W* means, const T* g, const T* result, const tg_lies& lies, const tg_place& at) {
    constexpr int LANES = 8;
    const int lane = threadIdx.x % LANES;
    const T* of_head = tg_head(g, lies.g, at.n, at.head);
#pragma unroll 1
    for (int row = threadIdx.x / LANES; row < ROWS; row += TG_THREADS / LANES) {
        const int query = at.first + row;
        const T *left = of_head + query * lies.g[1],
                *right = result + ((at.n * lies.t + query) * lies.heads + at.head) * lies.features;
        W sum = W(0);
        if (query < lies.t) {
#pragma unroll 8
            for (int c = lane; c < lies.features; c += LANES) sum = fma(tg_load(left[c]), tg_load(right[c]), sum);
        }
        sum = tg_warp_reduce<tg_add<W>, LANES>(sum);
        if (lane != 0) continue;
        to[row * TG_STATS + 2] = sum;
        if (query < lies.t) means[tg_query(lies, at, query)] = sum;
    }
}

// ---- the derivative of a tile of scores

// The weights of a tile as far as they are kept, and the cotangents of its scores; `stats`: of its queries.
template <bool TURNED, int A, int B>
TG_INLINE void tg_back(const tg_both<A>& own, const tg_both<B>& other, const W* stats, const M* mask,
                       const tg_lies& lies, const tg_place& at, int query, int key, W (&weights)[TG_I][TG_J],
                       W (&back)[TG_I][TG_J]) {
    tg_scores<TURNED>(own.k, other.k, mask, lies, at, query, key, weights);
    tg_dots<WD>(own.w, other.w, back);
    const tg_kept<TURNED> kept(lies, at, query, key);
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < TG_J; ++j) {
            const int place = TURNED ? tg_column(j) : tg_row(i);
            const W* of = stats + place * TG_STATS;
            const W most = of[0], inverse = of[1], mean = of[2];
            const W weight = query + place < lies.t ? exp(weights[i][j] - most) * inverse : W(0);
            const W share = kept.share(i, j);
            back[i][j] = tg_blind(lies, most) ? W(0) : weight * (back[i][j] * share - mean);
            weights[i][j] = weight * share;
        }
}
