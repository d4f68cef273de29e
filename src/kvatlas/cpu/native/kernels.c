/* The CPU kernels: attention over a paged cache, linear layers, normalisation, noise. One thread, fp32, no library.
 *
 * The contract: a row's result is summed in an order that depends on the row alone, never on its neighbours, the number
 * of rows, the chunking of new tokens or the placement of pages; and it is the same bits on every target. So every
 * number is a lane of a vector of 16, which narrower targets hold in several registers, every product that is added is a
 * fused multiply-add, and the compiler contracts nothing by itself. Tiles differ between targets: a tile chooses which
 * rows are computed together, never how one is summed.
 */

#include <stdint.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#if defined(_WIN32)
#define API __attribute__((dllexport))
int _fltused = 0;
int DllMainCRTStartup(void *module, unsigned reason, void *reserved) { return 1; }
#else
#define API __attribute__((visibility("default")))
#endif

/* Registers for vectors of 16 floats: 32 with AVX-512; 8 as pairs (AVX2) or fours (NEON). */
#if defined(__AVX512F__)
#define WIDE 1
#else
#define WIDE 0
#endif

typedef float vec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint64_t lvec __attribute__((vector_size(64)));
typedef double dvec __attribute__((vector_size(64)));
/* A vector without alignment. */
typedef float vec_at __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec_at __attribute__((vector_size(64), aligned(4), may_alias));
typedef double dvec_at __attribute__((vector_size(64), aligned(8), may_alias));
typedef uint64_t lvec_at __attribute__((vector_size(64), aligned(8), may_alias));
typedef uint8_t bytes_at __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t short_at __attribute__((aligned(1), may_alias));
typedef uint16_t shorts_at __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t word_at __attribute__((aligned(1), may_alias));
typedef uint64_t long_at __attribute__((aligned(1), may_alias));
typedef _Float16 half_at __attribute__((aligned(1), may_alias));
typedef uint32_t words8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t uvec_at __attribute__((vector_size(64), aligned(4), may_alias));

#if defined(__clang__)
#define FMA(a, b, c) __builtin_elementwise_fma(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c)) /* with -ffp-contract=fast */
#endif

#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
/* Prefetch into the second-level cache, since the first is too small for the tiles in use. */
#define FETCH(p) __builtin_prefetch(p, 0, 2)

INLINE vec load(const float *p) { return *(const vec_at *)p; }
INLINE void store(float *p, vec v) { *(vec_at *)p = v; }
INLINE vec load_shorts(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const shorts_at *)p, uvec) << 16); }
/* Sixteen numbers of a row of floats, or of `shorts`: bfloat16 numbers. */
INLINE vec load_of(const int shorts, const void *row, int64_t at) {
    return shorts ? load_shorts((const uint16_t *)row + at) : load((const float *)row + at);
}
INLINE const void *step(const int shorts, const void *row, int64_t count) {
    return (const char *)row + count * (shorts ? 2 : 4);
}
INLINE vec splat(float x) { return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE ivec isplat(int32_t x) { return (ivec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE lvec lsplat(uint64_t x) { return (lvec){x, x, x, x, x, x, x, x}; }
INLINE vec select(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE vec larger(vec a, vec b) { return select(a > b, a, b); }

static const ivec COUNT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Load the first `n` < 16 floats; the other lanes are 0. */
INLINE vec load_part(const float *p, int64_t n) {
    float part[LANES] = {0};
    for (int64_t i = 0; i < n; i++) part[i] = p[i];
    return load(part);
}

INLINE void store_part(float *p, vec v, int64_t n) {
    float part[LANES];
    store(part, v);
    for (int64_t i = 0; i < n; i++) p[i] = part[i];
}

/* The level of an x86-64 processor: 4 (AVX-512), 3 (AVX2 and FMA) or 0. Compiled for the lowest. */
#if defined(__x86_64__)
__attribute__((target("arch=x86-64"))) static void cpuid(uint32_t leaf, uint32_t part, uint32_t *r) {
    __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(part));
}
__attribute__((target("arch=x86-64"))) API int kvatlas_x86_level(void) {
    uint32_t top[4], one[4], seven[4], extended[4], saved, high;
    cpuid(0, 0, top), cpuid(1, 0, one), cpuid(0x80000001u, 0, extended);
    if (top[0] < 7 || !(one[2] >> 27 & 1)) return 0;
    cpuid(7, 0, seven);
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    const uint32_t first = 1u << 12 | 1u << 22 | 1u << 28 | 1u << 29; /* FMA, MOVBE, AVX, F16C */
    const uint32_t second = 1u << 3 | 1u << 5 | 1u << 8;               /* BMI1, AVX2, BMI2 */
    const uint32_t third = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31; /* AVX-512 F, DQ, CD, BW, VL */
    if ((one[2] & first) != first || (seven[1] & second) != second || !(extended[2] >> 5 & 1)) return 0;
    if ((saved & 6) != 6) return 0;
    return (seven[1] & third) == third && (saved & 0xE6) == 0xE6 ? 4 : 3;
}
#endif

/* The functions that a compiler may call by itself, since there is no C library. */
#if !defined(KVATLAS_HOSTED)
#if defined(__clang__)
#define PLAIN __attribute__((visibility("hidden"), no_builtin))
#else
#define PLAIN __attribute__((visibility("hidden"), optimize("no-tree-loop-distribute-patterns")))
#endif
PLAIN void *memset(void *to, int byte, __SIZE_TYPE__ n) {
    for (__SIZE_TYPE__ i = 0; i < n; i++) ((volatile char *)to)[i] = (char)byte;
    return to;
}
PLAIN void *memcpy(void *restrict to, const void *restrict from, __SIZE_TYPE__ n) {
    for (__SIZE_TYPE__ i = 0; i < n; i++) ((volatile char *)to)[i] = ((const char *)from)[i];
    return to;
}
#endif

/* exp to about one unit in the last place; exactly 0 below -87. Coefficients of Cephes' expf. */
INLINE vec exponential(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    vec t = FMA(x, splat(1.44269504088896341f), magic);
    vec n = t - magic;
    vec r = FMA(n, splat(-0.693359375f), x);
    r = FMA(n, splat(2.12194440e-4f), r);
    vec p = splat(1.9875691500e-4f);
    p = FMA(p, r, splat(1.3981999507e-3f));
    p = FMA(p, r, splat(8.3334519073e-3f));
    p = FMA(p, r, splat(4.1665795894e-2f));
    p = FMA(p, r, splat(1.6666665459e-1f));
    p = FMA(p, r, splat(5.0000001201e-1f));
    p = FMA(p, r * r, r) + splat(1.0f);
    vec y = (vec)((uvec)p + ((uvec)t << 23));
    y = (vec)((ivec)y & (x >= splat(-87.0f)));
    y = select(x > splat(88.72f), splat(__builtin_inff()), y);
    return select(x == x, y, x);
}

/* Sums over lanes by halves that need one shuffle each. Lane 4a + b of a sum over 16 lanes goes in as
 * s(a) = (0 + 2) + (1 + 3) over b, then (s(0) + s(2)) + (s(1) + s(3)). `tree` is the same on separate numbers. */
INLINE vec merge1(vec a, vec b) {
    return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
INLINE vec merge2(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
INLINE vec merge3(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
INLINE vec merge4(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
INLINE float sum(vec v) {
    float s[4];
    for (int a = 0; a < 4; a++) s[a] = (v[4 * a] + v[4 * a + 2]) + (v[4 * a + 1] + v[4 * a + 3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}
INLINE float largest(vec v) {
    v = larger(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = larger(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
    v = larger(v, SHUFFLE(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
    return v[0] > v[1] ? v[0] : v[1];
}

/* ---- Linear layers: each output is one chain of multiply-adds over k, from its bias up. ---- */

/* What a word of 32 bits of a row or of packed weights holds: a float, or a pair of bfloat16 numbers of which the odd one
 * is added first. That is the order of the processors that multiply pairs, so others compute the same bits (but for
 * subnormal numbers, which the former take for 0). In bytes, a word of weights holds four codes: see below. */
enum kind { FLOATS, PAIRS, PAIRS_AT_ONCE, BYTES, BYTES_AT_ONCE };

/* True if this processor multiplies pairs, and this library was compiled for it. */
API int kvatlas_multiplies_pairs(void) {
#if defined(__AVX512F__)
    uint32_t features[4];
    cpuid(7, 1, features);
    return features[0] >> 5 & 1; /* AVX512_BF16 */
#else
    return 0;
#endif
}

/* True if this processor multiplies bytes in fours, and this library was compiled for it. */
API int kvatlas_multiplies_bytes(void) {
#if defined(__AVX512F__)
    uint32_t features[4];
    cpuid(7, 0, features);
    return features[2] >> 11 & 1; /* AVX512_VNNI */
#else
    return 0;
#endif
}

INLINE vec odd(vec pairs) { return (vec)((uvec)pairs & 0xFFFF0000u); }
INLINE vec even(vec pairs) { return (vec)((uvec)pairs << 16); }

/* sum + a b, for the numbers in each word. */
INLINE vec multiply_add(const enum kind kind, vec a, vec b, vec sum) {
    if (kind == FLOATS) return FMA(a, b, sum);
#if defined(__AVX512F__)
    if (kind == PAIRS_AT_ONCE) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
#endif
    return FMA(even(a), even(b), FMA(odd(a), odd(b), sum));
}

/* What a tile fetches for later ones: at each word `step` bytes further; without a step the words of its own panels. */
struct fetched {
    const char *from;
    int64_t step;
};

/* `continued` sums of earlier words are in `y`; else they begin with the bias. */
INLINE void linear_tile(const enum kind kind, const int rows, const int panels, const int continued,
                        const struct fetched fetched, const float *x, int64_t x_stride, const float *w,
                        const float *bias, float *y, int64_t y_stride, int64_t words, int64_t last) {
    vec sums[8][8];
    for (int p = 0; p < panels; p++) {
        const int is_part = p == panels - 1 && last != LANES;
        vec from = splat(0.0f);
        if (bias) from = is_part ? load_part(bias + p * LANES, last) : load(bias + p * LANES);
        for (int r = 0; r < rows; r++) {
            const float *earlier = y + r * y_stride + p * LANES;
            if (continued) from = is_part ? load_part(earlier, last) : load(earlier);
            sums[r][p] = from;
        }
    }
    for (int64_t k = 0; k < words; k++) {
        vec weights[8];
        if (fetched.step) __builtin_prefetch(fetched.from + k * fetched.step, 0, 3);
        for (int p = 0; p < panels; p++) {
            const float *at = w + (p * words + k) * LANES;
            weights[p] = load(at);
            if (!fetched.step) __builtin_prefetch(at + 64 * LANES, 0, 3);
        }
        /* Compilers take assembly for long, and would keep loops around it with sums in memory. */
#pragma clang loop unroll(full)
        for (int r = 0; r < rows; r++) {
            vec own = splat(x[r * x_stride + k]);
#pragma clang loop unroll(full)
            for (int p = 0; p < panels; p++) sums[r][p] = multiply_add(kind, own, weights[p], sums[r][p]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            float *to = y + r * y_stride + p * LANES;
            if (p < panels - 1 || last == LANES) store(to, sums[r][p]);
            else store_part(to, sums[r][p], last);
        }
}

#if WIDE
#define ROW_TILE 8
#define PANELS_OF_FEW 4
#else
#define ROW_TILE 4
#define PANELS_OF_FEW 2
#endif

INLINE void linear_rows(const enum kind kind, const int panels, const float *x, int64_t x_stride, const float *w,
                        const float *bias, float *y, int64_t y_stride, int64_t rows, int64_t words, int64_t last) {
    int64_t r = 0;
    const struct fetched own = {0, 0};
#define ROWS(count)                                                                                                    \
    linear_tile(kind, count, panels, 0, own, x + r * x_stride, x_stride, w, bias, y + r * y_stride, y_stride, words, last)
    for (; r + ROW_TILE <= rows; r += ROW_TILE) ROWS(ROW_TILE);
#define REST(count)                                                                                                    \
    if (count < ROW_TILE && (rows - r) & count) {                                                                      \
        ROWS(count);                                                                                                   \
        r += count;                                                                                                    \
    }
    REST(4) REST(2) REST(1)
#undef REST
#undef ROWS
}

#if !WIDE
#define BLOCK_WORDS 256 /* whose weights, 16 KB of a panel, stay in the first cache from tile to tile */

/* The rows of the next tile, of so many left. Six fill the registers; four and four take less time than six and two. */
INLINE int64_t next_rows(int64_t left) {
    if (left >= 6 && left != 8) return 6;
    return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* A panel for more rows than one tile has: block by block of its words, each read from memory once. All tiles of a block
 * together fetch the next block, so that memory is read while they compute. */
INLINE void linear_blocks(const enum kind kind, const float *x, int64_t x_stride, const float *w, const float *bias,
                          float *y, int64_t y_stride, int64_t rows, int64_t words, int64_t last) {
    int64_t tiles = 0;
    for (int64_t r = 0; r < rows; r += next_rows(rows - r)) tiles++;
    for (int64_t first = 0; first < words; first += BLOCK_WORDS) {
        const int64_t count = words - first < BLOCK_WORDS ? words - first : BLOCK_WORDS;
        const float *block = w + first * LANES, *next = block + count * LANES;
        struct fetched fetched = {(const char *)next, (LANES * 4 + tiles - 1) / tiles};
        for (int64_t r = 0; r < rows;) {
            const int64_t tile_rows = next_rows(rows - r);
            const float *inputs = x + r * x_stride + first;
            float *to = y + r * y_stride;
#define ROWS(number)                                                                                                   \
    if (tile_rows == number) {                                                                                         \
        if (first) linear_tile(kind, number, 1, 1, fetched, inputs, x_stride, block, 0, to, y_stride, count, last);    \
        else linear_tile(kind, number, 1, 0, fetched, inputs, x_stride, block, bias, to, y_stride, count, last);       \
    }
            ROWS(6) ROWS(4) ROWS(2) ROWS(1)
#undef ROWS
            fetched.from += count * fetched.step;
            r += tile_rows;
        }
    }
}
#endif

INLINE void linear(const enum kind kind, const float *x, int64_t x_stride, const float *w, const float *bias, float *y,
                   int64_t y_stride, int64_t rows, int64_t words, int64_t outputs) {
    int64_t panels = (outputs + LANES - 1) / LANES, p = 0;
    int64_t whole = outputs / LANES, rest = outputs - whole * LANES;
#define PANELS(count)                                                                                                  \
    for (; p + count <= panels; p += count)                                                                            \
        linear_rows(kind, count, x, x_stride, w + p * words * LANES, bias ? bias + p * LANES : 0, y + p * LANES,       \
                    y_stride, rows, words, p + count == panels && rest ? rest : LANES);
    if (rows <= 2) {
        PANELS(PANELS_OF_FEW)
    }
#if WIDE
    PANELS(3)
    PANELS(2)
#else
    if (rows > ROW_TILE)
        for (; p < panels; p++)
            linear_blocks(kind, x, x_stride, w + p * words * LANES, bias ? bias + p * LANES : 0, y + p * LANES, y_stride,
                          rows, words, p + 1 == panels && rest ? rest : LANES);
#endif
    PANELS(1)
#undef PANELS
}

#if defined(__AVX512F__)
__attribute__((target("avx512bf16"))) static void linear_at_once(const float *x, int64_t x_stride, const float *w,
                                                                 const float *bias, float *y, int64_t y_stride,
                                                                 int64_t rows, int64_t words, int64_t outputs) {
    linear(PAIRS_AT_ONCE, x, x_stride, w, bias, y, y_stride, rows, words, outputs);
}
#else
#define linear_at_once(...) linear(PAIRS, __VA_ARGS__)
#endif

/* y [rows][outputs] = x [rows][inputs] W^T + bias; w packed as [panels][words][16], zeros behind the last output. Rows of
 * x have as many words, from which on `kind` says what is in one; strides are words, too. */
API void kvatlas_linear(const float *x, int64_t x_stride, const float *w, const float *bias, float *y, int64_t y_stride,
                        int64_t rows, int64_t words, int64_t outputs, int64_t kind) {
    if (kind == FLOATS) linear(FLOATS, x, x_stride, w, bias, y, y_stride, rows, words, outputs);
    else if (kind == PAIRS) linear(PAIRS, x, x_stride, w, bias, y, y_stride, rows, words, outputs);
    else linear_at_once(x, x_stride, w, bias, y, y_stride, rows, words, outputs);
}

/* A number in bfloat16: the nearest, or the even one. */
INLINE uint32_t shortened(uint32_t bits) {
    const int is_number = (bits & 0x7FFFFFFFu) <= 0x7F800000u;
    return is_number ? (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16 : 0x7FC0u;
}

/* Round the numbers of each row to bfloat16 at the row's beginning. */
API void kvatlas_shorten(float *x, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++, x += width) {
        uint32_t *to = (uint32_t *)x;
        for (int64_t k = 0; k < width; k += 2) {
            uint32_t half[2];
            for (int i = 0; i < 2; i++) half[i] = shortened(((const word_at *)x)[k + i]);
            *(word_at *)(to + k / 2) = half[0] | half[1] << 16;
        }
    }
}

/* x [rows][inputs] = the weights of the outputs `chosen` [rows], packed as above. Returns 0 if one is not among them. */
API int64_t kvatlas_unpack(const float *w, int64_t outputs, const int64_t *chosen, float *x, int64_t rows, int64_t words,
                           int64_t kind) {
    for (int64_t r = 0; r < rows; r++) {
        if (chosen[r] < 0 || chosen[r] >= outputs) return 0;
        const float *from = w + chosen[r] / LANES * words * LANES + chosen[r] % LANES;
        for (int64_t k = 0; k < words; k++) {
            const float word = from[k * LANES];
            if (kind == FLOATS) {
                *x++ = word;
                continue;
            }
            const uint32_t bits = *(const word_at *)(from + k * LANES);
            *(word_at *)x++ = bits << 16;
            *(word_at *)x++ = bits & 0xFFFF0000u;
        }
    }
    return 1;
}

/* ---- Linear layers in bytes ---- */

/* 32 inputs in a row are a group, with a scale for each output and one for each row of inputs. A number is its scale times
 * a code of -127 to 127. The products of codes are added exactly, in integers; then sum * (weight scale * input scale) is
 * added to the output by one multiply-add a group, in the order of the groups, from the bias up.
 *
 * A panel of weights [16 outputs] is [groups] of [8][16] words with four codes each, 128 added to every code, and of [16]
 * scales in half precision behind them. Inputs come in tiles of rows, [groups][rows of the tile] of `struct group`. */
#define GROUP_OF_BYTES 32
#define GROUP_WORDS 8
#define BYTE_ROWS 16
#define AHEAD_GROUPS 8 /* between what is fetched and what is read */
#define CODE_BYTES (GROUP_OF_BYTES * LANES)
#define WEIGHT_BYTES (CODE_BYTES + 2 * LANES) /* of a group */

/* 32 inputs of a row: `shift` takes back the 128 of the weights' codes. Processors that multiply four bytes at once read
 * words of them, `codes` alone; for others `pairs` has the codes 0 and 2, then 1 and 3, of each word in 16 bits. */
struct group {
    float scale;
    int32_t shift, codes[GROUP_WORDS];
};
struct wide_group {
    float scale;
    int32_t shift, pairs[2 * GROUP_WORDS];
};

INLINE ivec rounded(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23 */
    return (ivec)(x + magic) - (ivec)magic;
}

/* Put 32 numbers into a group. One that is no finite number makes the scale, and with it every output, no number. */
static void fill_group(const enum kind kind, const float *x, void *to) {
    const vec low = load(x), high = load(x + LANES), zero = splat(0.0f);
    const float most = largest(larger(larger(low, -low), larger(high, -high)));
    const int is_finite = sum(low * zero + high * zero) == 0.0f;
    /* Far smaller numbers than any that matters would have no inverse. */
    const float inverse = is_finite && most > 1e-30f ? 127.0f / most : 0.0f;
    const ivec usable = isplat(inverse > 0.0f ? -1 : 0);
    int32_t codes[GROUP_OF_BYTES];
    *(ivec_at *)codes = rounded(low * splat(inverse)) & usable;
    *(ivec_at *)(codes + LANES) = rounded(high * splat(inverse)) & usable;

    struct group *group = to;
    group->scale = is_finite ? (inverse > 0.0f ? most / 127.0f : 0.0f) : __builtin_nanf("");
    int32_t total = 0;
    for (int i = 0; i < GROUP_OF_BYTES; i++) total += codes[i];
    group->shift = -128 * total;
    if (kind == BYTES_AT_ONCE) {
        for (int k = 0; k < GROUP_WORDS; k++) {
            const int32_t *c = codes + 4 * k;
            group->codes[k] = (c[0] & 255) | (c[1] & 255) << 8 | (c[2] & 255) << 16 | (int32_t)((uint32_t)c[3] << 24);
        }
        return;
    }
    for (int k = 0; k < GROUP_WORDS; k++) {
        const int32_t *c = codes + 4 * k;
        ((struct wide_group *)to)->pairs[2 * k] = (c[0] & 0xFFFF) | (int32_t)((uint32_t)c[2] << 16);
        ((struct wide_group *)to)->pairs[2 * k + 1] = (c[1] & 0xFFFF) | (int32_t)((uint32_t)c[3] << 16);
    }
}

/* Bytes of a group of inputs. */
INLINE int64_t group_bytes(const enum kind kind) {
    return kind == BYTES_AT_ONCE ? sizeof(struct group) : sizeof(struct wide_group);
}

/* Words for so many rows of inputs in bytes. */
API int64_t kvatlas_byte_words(int64_t rows, int64_t inputs) {
    return rows * (inputs / GROUP_OF_BYTES) * (int64_t)(sizeof(struct wide_group) / 4);
}

/* Write rows of numbers, of which there are a multiple of 32, in tiles of 16 rows to `to`. */
API void kvatlas_to_bytes(const float *x, int64_t x_stride, int64_t rows, int64_t inputs, void *to, int64_t kind) {
    const int64_t groups = inputs / GROUP_OF_BYTES, bytes = group_bytes(kind);
    uint8_t *tile = to;
    for (int64_t first = 0; first < rows; first += BYTE_ROWS) {
        const int64_t count = rows - first < BYTE_ROWS ? rows - first : BYTE_ROWS;
        for (int64_t r = 0; r < count; r++)
            for (int64_t g = 0; g < groups; g++)
                fill_group(kind, x + (first + r) * x_stride + g * GROUP_OF_BYTES, tile + (g * count + r) * bytes);
        tile += count * groups * bytes;
    }
}

/* Scales in half precision; the conversion is exact. */
INLINE vec load_scales(const uint8_t *at) {
    typedef _Float16 halves __attribute__((vector_size(32), aligned(1), may_alias));
    return __builtin_convertvector(*(const halves *)at, vec);
}

/* sum + the products of 32-bit words of weights with a word of inputs, four codes at once. */
#if defined(__AVX512F__)
#define ADD_FOURS(sum, weights, word) __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(word))
#else
#define ADD_FOURS(sum, weights, word)
#endif

/* Products of two pairs of 16-bit numbers in each word, added. */
INLINE ivec multiply_pairs(ivec a, int32_t word) {
#if defined(__AVX512BW__)
    typedef short shorts __attribute__((vector_size(64)));
    return (ivec)__builtin_ia32_pmaddwd512((shorts)a, (shorts)isplat(word));
#elif defined(__AVX2__)
    typedef short shorts __attribute__((vector_size(32)));
    typedef int32_t words __attribute__((vector_size(32)));
    const words pair = {word, word, word, word, word, word, word, word};
    const words low = SHUFFLE(a, a, 0, 1, 2, 3, 4, 5, 6, 7), high = SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15);
    const words first = (words)__builtin_ia32_pmaddwd256((shorts)low, (shorts)pair);
    const words second = (words)__builtin_ia32_pmaddwd256((shorts)high, (shorts)pair);
    return SHUFFLE(first, second, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    return (a & 0xFFFF) * isplat((int16_t)word) + (a >> 16) * isplat(word >> 16);
#endif
}

/* One panel of outputs for `rows` rows of a tile of `tile_rows`. */
INLINE void byte_tile(const enum kind kind, const int rows, int64_t tile_rows, const uint8_t *x, const uint8_t *w,
                      const float *bias, float *y, int64_t y_stride, int64_t groups, int64_t outputs) {
    vec sums[BYTE_ROWS];
    vec from = splat(0.0f);
    if (bias) from = outputs == LANES ? load(bias) : load_part(bias, outputs);
    for (int r = 0; r < rows; r++) sums[r] = from;

    for (int64_t g = 0; g < groups; g++, w += WEIGHT_BYTES) {
        const vec scales = load_scales(w + CODE_BYTES);
        const ivec_at *words = (const ivec_at *)w;
        for (int k = 0; k <= GROUP_WORDS; k++) __builtin_prefetch(w + AHEAD_GROUPS * WEIGHT_BYTES + k * 64, 0, 3);
        if (kind == BYTES_AT_ONCE) {
            const struct group *inputs = (const struct group *)x + g * tile_rows;
            ivec weights[GROUP_WORDS];
            for (int k = 0; k < GROUP_WORDS; k++) weights[k] = words[k];
#pragma clang loop unroll(full)
            for (int r = 0; r < rows; r++) {
                /* Of few rows one chain would wait for itself. */
                ivec total = isplat(inputs[r].shift), others = isplat(0);
#pragma clang loop unroll(full)
                for (int k = 0; k < GROUP_WORDS; k += 2) {
                    ADD_FOURS(total, weights[k], inputs[r].codes[k]);
                    if (rows <= 4) ADD_FOURS(others, weights[k + 1], inputs[r].codes[k + 1]);
                    else ADD_FOURS(total, weights[k + 1], inputs[r].codes[k + 1]);
                }
                if (rows <= 4) total += others;
                sums[r] = FMA(__builtin_convertvector(total, vec), scales * splat(inputs[r].scale), sums[r]);
            }
            continue;
        }
        const struct wide_group *inputs = (const struct wide_group *)x + g * tile_rows;
        ivec totals[BYTE_ROWS];
        for (int r = 0; r < rows; r++) totals[r] = isplat(inputs[r].shift);
        for (int k = 0; k < GROUP_WORDS; k++) {
            const ivec even_codes = words[k] & 0x00FF00FF, odd_codes = (ivec)((uvec)words[k] >> 8) & 0x00FF00FF;
#pragma clang loop unroll(full)
            for (int r = 0; r < rows; r++) {
                totals[r] += multiply_pairs(even_codes, inputs[r].pairs[2 * k]);
                totals[r] += multiply_pairs(odd_codes, inputs[r].pairs[2 * k + 1]);
            }
        }
        for (int r = 0; r < rows; r++)
            sums[r] = FMA(__builtin_convertvector(totals[r], vec), scales * splat(inputs[r].scale), sums[r]);
    }
    for (int r = 0; r < rows; r++) {
        if (outputs == LANES) store(y + r * y_stride, sums[r]);
        else store_part(y + r * y_stride, sums[r], outputs);
    }
}

INLINE void linear_bytes(const enum kind kind, const uint8_t *x, const uint8_t *w, const float *bias, float *y,
                         int64_t y_stride, int64_t rows, int64_t groups, int64_t outputs) {
    const int64_t bytes = group_bytes(kind);
    for (int64_t p = 0; p * LANES < outputs; p++, w += groups * WEIGHT_BYTES) {
        const int64_t left = outputs - p * LANES, own = left < LANES ? left : LANES;
        for (int64_t first = 0; first < rows; first += BYTE_ROWS) {
            const int64_t count = rows - first < BYTE_ROWS ? rows - first : BYTE_ROWS;
            const uint8_t *tile = x + first * groups * bytes;
            int64_t r = 0;
#define ROWS(number)                                                                                                   \
    for (; r + number <= count; r += number)                                                                           \
        byte_tile(kind, number, count, tile + r * bytes, w, bias ? bias + p * LANES : 0,                   \
                  y + (first + r) * y_stride + p * LANES, y_stride, groups, own);
            if (kind == BYTES_AT_ONCE) {
                ROWS(16) ROWS(8)
            }
            ROWS(4) ROWS(2) ROWS(1)
#undef ROWS
        }
    }
}

#if defined(__AVX512F__)
__attribute__((target("avx512vnni"))) static void linear_bytes_at_once(const uint8_t *x, const uint8_t *w,
                                                                       const float *bias, float *y, int64_t y_stride,
                                                                       int64_t rows, int64_t groups, int64_t outputs) {
    linear_bytes(BYTES_AT_ONCE, x, w, bias, y, y_stride, rows, groups, outputs);
}
#else
#define linear_bytes_at_once(...) linear_bytes(BYTES, __VA_ARGS__)
#endif

/* y [rows][outputs] = x W^T + bias for inputs of `kvatlas_to_bytes` with the same `kind`. */
API void kvatlas_linear_bytes(const void *x, const void *w, const float *bias, float *y, int64_t y_stride, int64_t rows,
                              int64_t inputs, int64_t outputs, int64_t kind) {
    if (kind == BYTES) linear_bytes(BYTES, x, w, bias, y, y_stride, rows, inputs / GROUP_OF_BYTES, outputs);
    else linear_bytes_at_once(x, w, bias, y, y_stride, rows, inputs / GROUP_OF_BYTES, outputs);
}

/* x [rows][inputs] = the weights in bytes of the outputs `chosen` [rows]. Returns 0 if one is not among them. */
API int64_t kvatlas_unpack_bytes(const uint8_t *w, int64_t outputs, const int64_t *chosen, float *x, int64_t rows,
                                 int64_t inputs) {
    const int64_t groups = inputs / GROUP_OF_BYTES;
    for (int64_t r = 0; r < rows; r++, x += inputs) {
        if (chosen[r] < 0 || chosen[r] >= outputs) return 0;
        const int64_t lane = chosen[r] % LANES;
        const uint8_t *at = w + chosen[r] / LANES * groups * WEIGHT_BYTES;
        for (int64_t g = 0; g < groups; g++, at += WEIGHT_BYTES) {
            const float scale = (float)*(const half_at *)(at + CODE_BYTES + 2 * lane);
            for (int64_t k = 0; k < GROUP_OF_BYTES; k++)
                x[g * GROUP_OF_BYTES + k] = scale * (float)(at[(k / 4 * LANES + lane) * 4 + k % 4] - 128);
        }
    }
    return 1;
}

/* ---- Attention over pages ---- */

#define BLOCK 64                  /* tokens between two looks at the largest score */
#define QUARTERS (BLOCK / LANES)  /* pages are whole vectors of tokens */
#define TILE 32                   /* queries that share a block of keys and values */
#define AHEAD 32                  /* tokens between what is fetched and what is read, */
#define AHEAD_SMALL 64            /* and of keys with fewer than 64 numbers */

/* A ragged batch of sequences on pages, the same for every layer. */
struct batch {
    int64_t sequences, page_size, table_width, watched_width;
    const int32_t *table;   /* [sequences][table_width]: pages */
    const int32_t *starts;  /* [sequences + 1]: first new token */
    const int32_t *lengths; /* [sequences]: tokens cached before */
    const int32_t *watched; /* [sequences]: row of `mass`, or -1; null where nobody asked */
    const int32_t *rows;    /* [sequences]: row of `recent` */
    const int32_t *first;   /* [sequences]: position of the first new token */
    float *scratch;
};

/* Keys or values of one layer: the new ones, and the pool of the cached ones. A pool holds floats, or `bits` a number:
 * rows of `bytes` with codes, 16 at a time, and a scale and a zero point for each `group` of numbers. The newest
 * `residual` tokens of a sequence have floats besides: the token at position p is in place p % residual. */
struct side {
    int64_t size, stride;     /* between new tokens; heads of a token lie side by side */
    const float *fresh;       /* [tokens][kv_heads][size] */
    void *pool;               /* [kv_heads][slots][size] or [kv_heads][slots][bytes] */
    int64_t bits, bytes;      /* bits 0: floats; 16: bfloat16 numbers; fewer: packed */
    int64_t group, residual;
    const float *recent;      /* [rows][kv_heads][residual][size] */
};

/* New queries, keys and values of one layer. */
struct layer {
    int64_t heads, kv_heads, slots;
    const float *query;
    int64_t query_stride;
    struct side key, value;
    float *out;                                     /* [tokens][heads][value_size] */
    int32_t *places;                                /* [kv_heads][slots]: positions; null without a window */
    const int32_t *positions;                       /* [tokens] */
    float *mass;                                    /* [watched][kv_heads][watched_width]; null where nobody asked */
    const float *sinks; /* [heads]: logits that take a share and have no value; null without */
    int64_t window;
    double scaling, softcap; /* scores become softcap tanh(score / softcap); 0 without */
    /* The biases of keys, null without: packed keys are without theirs, turned by `hadamard`, and end with the token's
     * position, whose row of `angles` rotates the bias. */
    const float *bias;   /* [kv_heads][key size] */
    const float *angles; /* [positions][key size]: cosines of the first half of the channels, then sines */
    int64_t positions_known;
};

/* One tile of queries of a KV head. `padded` and `chunks` are a key's floats and vectors, `wide` a value's floats. */
struct tile {
    int64_t count, padded, chunks, wide;
    float *queries /* [TILE][padded] */, *sums /* [TILE][wide] */, *shares /* [TILE][BLOCK] */, *parts /* [TILE][LANES] */;
    float *packed_queries /* [TILE][padded]: for packed keys */, *bias_queries /* [TILE][padded]: for rows of `angles` */;
    float *query_sums /* [TILE][chunks] */, *weights /* [TILE][wide / LANES][2 * LANES] */;
    float *turned /* [padded][BLOCK] */, *key_copy /* [BLOCK][padded] */, *value_copy /* [BLOCK][wide] */;
    float *scores /* [TILE][limit] */, softcap;
    int64_t sequence, start, length, recent; /* `recent`: the first token that is read in full precision */
    int64_t score_stride;
    float top[TILE], shrink[TILE];
    int32_t visible[TILE];  /* slots that a query sees */
    int32_t earliest[TILE]; /* and the last position that it does not, with a window */
};

/* Floats of scratch for keys and values of at most `size` and sequences of at most `longest` tokens, new ones included. */
API int64_t kvatlas_attention_scratch(int64_t size, int64_t longest, int64_t with_mass) {
    int64_t padded = (size + LANES - 1) / LANES * LANES;
    int64_t floats = 4 * TILE * padded + TILE * BLOCK + TILE * LANES + 3 * BLOCK * padded + 3 * TILE * padded;
    return floats + (with_mass ? TILE * ((longest + BLOCK - 1) / BLOCK * BLOCK) : 0);
}

/* Products of `n` queries with 16 keys; the next keys are prefetched meanwhile. */
INLINE void dot_rows(const int shorts, const int n, const int chunks, const float *queries, int64_t padded,
                     const void *keys, int64_t stride, const void *next, float *to) {
    vec q[4][16], quad[4][4];
    for (int i = 0; i < n; i++)
        for (int c = 0; c < chunks; c++) q[i][c] = load(queries + i * padded + c * LANES);
    for (int f = 0; f < 4; f++) {
        vec pair[4][2];
        for (int p = 0; p < 2; p++) {
            vec dot[4][2];
            for (int j = 0; j < 2; j++) {
                const int64_t row = (4 * f + 2 * p + j) * stride;
                for (int c = 0; c < chunks; c++) {
                    vec key = load_of(shorts, keys, row + c * LANES);
                    if (next && !(shorts && c & 1)) FETCH(step(shorts, next, row + c * LANES));
                    for (int i = 0; i < n; i++) dot[i][j] = c ? FMA(q[i][c], key, dot[i][j]) : q[i][c] * key;
                }
            }
            for (int i = 0; i < n; i++) pair[i][p] = merge1(dot[i][0], dot[i][1]);
        }
        for (int i = 0; i < n; i++) quad[i][f] = merge2(pair[i][0], pair[i][1]);
    }
    for (int i = 0; i < n; i++)
        store(to + i * BLOCK, merge4(merge3(quad[i][0], quad[i][1]), merge3(quad[i][2], quad[i][3])));
}

/* `dot_rows` for keys of any size. */
INLINE vec dot_rows_long(const int shorts, const float *query, const void *keys, int64_t stride, int64_t chunks) {
    vec r[4];
    for (int i = 0; i < 4; i++) {
        vec s[4];
        for (int j = 0; j < 4; j++) {
            const int64_t row = (4 * i + j) * stride;
            s[j] = load(query) * load_of(shorts, keys, row);
            for (int64_t c = 1; c < chunks; c++)
                s[j] = FMA(load(query + c * LANES), load_of(shorts, keys, row + c * LANES), s[j]);
        }
        r[i] = merge2(merge1(s[0], s[1]), merge1(s[2], s[3]));
    }
    return merge4(merge3(r[0], r[1]), merge3(r[2], r[3]));
}

/* Transpose 16 keys [16][stride] to [padded][BLOCK], one column a key. */
INLINE void turn(const int shorts, const void *keys, int64_t stride, const void *next, float *to, int64_t chunks) {
    for (int64_t c = 0; c < chunks; c++) {
        vec a[LANES], b[LANES];
        for (int i = 0; i < LANES; i++) {
            a[i] = load_of(shorts, keys, i * stride + c * LANES);
            FETCH(step(shorts, next, i * stride + c * LANES));
        }
        for (int i = 0; i < LANES; i += 4) {
            vec lo01 = SHUFFLE(a[i], a[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
            vec hi01 = SHUFFLE(a[i], a[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
            vec lo23 = SHUFFLE(a[i + 2], a[i + 3], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
            vec hi23 = SHUFFLE(a[i + 2], a[i + 3], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
            b[i] = SHUFFLE(lo01, lo23, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            b[i + 1] = SHUFFLE(lo01, lo23, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
            b[i + 2] = SHUFFLE(hi01, hi23, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            b[i + 3] = SHUFFLE(hi01, hi23, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
        for (int j = 0; j < 4; j++) {
            vec lo02 = SHUFFLE(b[j], b[j + 4], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
            vec hi02 = SHUFFLE(b[j], b[j + 4], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
            vec lo13 = SHUFFLE(b[j + 8], b[j + 12], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
            vec hi13 = SHUFFLE(b[j + 8], b[j + 12], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
            float *at = to + (c * LANES + j) * BLOCK;
            store(at, SHUFFLE(lo02, lo13, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27));
            store(at + 4 * BLOCK, SHUFFLE(lo02, lo13, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
            store(at + 8 * BLOCK, SHUFFLE(hi02, hi13, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27));
            store(at + 12 * BLOCK, SHUFFLE(hi02, hi13, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
        }
    }
}

/* Products of `n` queries with 16 or more keys that `turn` has turned: the sums of `dot_rows`, without its shuffles. */
INLINE void dot_turned(const int n, const int vectors, const float *queries, int64_t padded, const float *turned,
                       int64_t chunks, float *to) {
    vec s[4][4][4];
    for (int a = 0; a < 4; a++) {
        const int quarter = ((a & 1) << 1) | (a >> 1); /* 0, 2, 1, 3: as they are added */
        vec half[4][4];
        for (int b = 0; b < 4; b++) {
            const int lane = 4 * quarter + (((b & 1) << 1) | (b >> 1));
            vec part[4][4];
            for (int i = 0; i < n; i++)
                for (int v = 0; v < vectors; v++)
                    part[i][v] = splat(queries[i * padded + lane]) * load(turned + lane * BLOCK + v * LANES);
            for (int64_t c = 1; c < chunks; c++)
                for (int i = 0; i < n; i++)
                    for (int v = 0; v < vectors; v++)
                        part[i][v] = FMA(splat(queries[i * padded + c * LANES + lane]),
                                         load(turned + (c * LANES + lane) * BLOCK + v * LANES), part[i][v]);
            for (int i = 0; i < n; i++)
                for (int v = 0; v < vectors; v++) {
                    if (b == 0) s[a][i][v] = part[i][v];
                    if (b == 1) s[a][i][v] += part[i][v];
                    if (b == 2) half[i][v] = part[i][v];
                    if (b == 3) s[a][i][v] += half[i][v] + part[i][v];
                }
        }
        for (int i = 0; i < n; i++)
            for (int v = 0; v < vectors; v++) {
                if (a == 1) s[0][i][v] += s[1][i][v];
                if (a == 3) s[0][i][v] += s[2][i][v] + s[3][i][v];
            }
    }
    for (int i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++) store(to + i * BLOCK + v * LANES, s[0][i][v]);
}

/* Scores of all queries of the tile with the keys of a block, into `shares`. */
INLINE void score_block(const int shorts, struct tile *t, const void *const *keys, const void *const *next,
                        int64_t stride, int64_t quarters) {
    if (t->count > 5) {
        for (int64_t s = 0; s < quarters; s++) turn(shorts, keys[s], stride, next[s], t->turned + s * LANES, t->chunks);
        int64_t i = 0;
#define TURNED(n, vectors)                                                                                             \
    for (; i + n <= t->count; i += n)                                                                                  \
        for (int64_t s = 0; s < quarters; s += vectors)                                                                \
            dot_turned(n, vectors, t->queries + i * t->padded, t->padded, t->turned + s * LANES, t->chunks,            \
                       t->shares + i * BLOCK + s * LANES);
#if WIDE
        TURNED(4, 1)
        TURNED(2, 1)
#endif
        TURNED(1, 1)
#undef TURNED
        return;
    }
    for (int64_t s = 0; s < quarters; s++) {
        int64_t i = 0;
#define ROWS(n)                                                                                                        \
    for (; i + n <= t->count; i += n) {                                                                                \
        const float *q = t->queries + i * t->padded;                                                                   \
        const void *after = i ? 0 : next[s];                                                                           \
        float *to = t->shares + i * BLOCK + s * LANES;                                                                 \
        switch (t->chunks) {                                                                                           \
        case 1: dot_rows(shorts, n, 1, q, t->padded, keys[s], stride, after, to); break;                               \
        case 2: dot_rows(shorts, n, 2, q, t->padded, keys[s], stride, after, to); break;                               \
        case 4: dot_rows(shorts, n, 4, q, t->padded, keys[s], stride, after, to); break;                               \
        case 8: dot_rows(shorts, n, 8, q, t->padded, keys[s], stride, after, to); break;                               \
        default:                                                                                                       \
            for (int64_t j = 0; j < n; j++)                                                                            \
                store(to + j * BLOCK, dot_rows_long(shorts, q + j * t->padded, keys[s], stride, t->chunks));           \
        }                                                                                                              \
    }
        ROWS(3)
        ROWS(2)
        ROWS(1)
#undef ROWS
    }
}

INLINE vec capped(vec x, float softcap) {
    vec tanh = splat(1.0f) - splat(2.0f) / (exponential(x * splat(2.0f / softcap)) + splat(1.0f));
    return tanh * splat(softcap);
}

/* Softmax of a block: apply masks, update the running maximum, and replace the scores in `shares` by exponentials. */
INLINE void soften_block(const int plain, struct tile *t, int64_t block, int64_t quarters, const int32_t *const *places) {
    for (int64_t i = 0; i < t->count; i++) {
        float *own = t->shares + i * BLOCK;
        vec scores[QUARTERS], top = splat(t->top[i]);
        for (int64_t s = 0; s < QUARTERS; s++) {
            scores[s] = s < quarters ? load(own + s * LANES) : splat(-__builtin_inff());
            if (!plain && t->softcap != 0.0f) scores[s] = capped(scores[s], t->softcap);
            ivec seen = isplat((int32_t)(block + s * LANES)) + COUNT < isplat(t->visible[i]);
            if (places && s < quarters) seen &= *(const ivec_at *)places[s] > isplat(t->earliest[i]);
            scores[s] = select(seen, scores[s], splat(-__builtin_inff()));
            if (t->scores) store(t->scores + i * t->score_stride + block + s * LANES, scores[s]);
            top = larger(scores[s], top);
        }
        float highest = largest(top);
        vec shrink = exponential(splat(t->top[i] - highest)), part = load(t->parts + i * LANES) * shrink;
        for (int64_t s = 0; s < QUARTERS; s++) {
            vec share = exponential(scores[s] - splat(highest));
            store(own + s * LANES, share);
            part += share;
        }
        store(t->parts + i * LANES, part);
        t->shrink[i] = shrink[0];
        t->top[i] = highest;
    }
}

/* sums [n][vectors * 16] = sums * shrink + shares [n][tokens] values [tokens]. */
INLINE void add_values(const int shorts, const int n, const int vectors, float *sums, int64_t padded,
                       const float *shares, const float *shrink, const void *const *values, const void *const *next,
                       int64_t stride, int64_t offset, int64_t tokens) {
    vec own[8][8];
    for (int i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++) own[i][v] = load(sums + i * padded + v * LANES) * splat(shrink[i]);
    for (int64_t s = 0; s * LANES < tokens; s++) {
        int64_t count = tokens - s * LANES < LANES ? tokens - s * LANES : LANES;
        const void *after = next ? next[s] : values[s];
        int64_t at = offset;
        for (int64_t j = 0; j < count; j++, at += stride) {
            vec value[8];
            for (int v = 0; v < vectors; v++) {
                value[v] = load_of(shorts, values[s], at + v * LANES);
                if (!(shorts && v & 1)) FETCH(step(shorts, after, at + v * LANES));
            }
            for (int i = 0; i < n; i++) {
                vec share = splat(shares[i * BLOCK + s * LANES + j]);
                for (int v = 0; v < vectors; v++) own[i][v] = FMA(share, value[v], own[i][v]);
            }
        }
    }
    for (int i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++) store(sums + i * padded + v * LANES, own[i][v]);
}

INLINE void value_columns(const int shorts, const int vectors, struct tile *t, const void *const *values,
                          const void *const *next, int64_t stride, int64_t column, int64_t tokens) {
    int64_t i = 0;
#define QUERIES(n)                                                                                                     \
    for (; i + n <= t->count; i += n)                                                                                  \
        add_values(shorts, n, vectors, t->sums + i * t->wide + column, t->wide, t->shares + i * BLOCK, t->shrink + i,  \
                   values, i ? 0 : next, stride, column, tokens);
#if WIDE
    QUERIES(6)
    QUERIES(4)
#endif
    QUERIES(3)
    QUERIES(2)
    QUERIES(1)
#undef QUERIES
}

INLINE void value_block(const int shorts, struct tile *t, const void *const *values, const void *const *next,
                        int64_t stride, int64_t tokens) {
    int64_t c = 0, chunks = t->wide / LANES;
#if WIDE
    for (; c + 4 <= chunks; c += 4) value_columns(shorts, 4, t, values, next, stride, c * LANES, tokens);
#endif
    for (; c + 2 <= chunks; c += 2) value_columns(shorts, 2, t, values, next, stride, c * LANES, tokens);
    for (; c < chunks; c++) value_columns(shorts, 1, t, values, next, stride, c * LANES, tokens);
}

/* Sixteen rows of a pool as floats, padded to whole vectors. */
INLINE void pad_rows(const int shorts, const void *rows, int64_t size, float *to, int64_t padded) {
    for (int64_t i = 0; i < LANES; i++)
        for (int64_t c = 0; c < padded; c += LANES) {
            int64_t at = i * size + c, rest = size - c;
            vec own;
            if (rest >= LANES) own = load_of(shorts, rows, at);
            else if (!shorts) own = load_part((const float *)rows + at, rest);
            else {
                uint16_t part[LANES] = {0};
                for (int64_t d = 0; d < rest; d++) part[d] = ((const uint16_t *)rows)[at + d];
                own = load_shorts(part);
            }
            store(to + i * padded + c, own);
        }
}

/* Return the slot of a sequence's token in the pool. */
INLINE int64_t slot_of(const struct batch *b, const int32_t *pages, int64_t token) {
    uint32_t page = (uint32_t)token / (uint32_t)b->page_size;
    return pages[page] * b->page_size + (token - page * b->page_size);
}

INLINE int is_packed(const struct side *s) { return s->bits && s->bits < 16; }
INLINE int is_short(const struct side *s) { return s->bits == 16; }
/* The pool's rows of one head. */
INLINE const char *rows_of(const struct layer *l, const struct side *s, int64_t head) {
    return (const char *)s->pool + head * l->slots * s->bytes;
}

/* Rows of packed numbers are words of 32 bits: codes, then a scale and a zero point (fp16) for each group. Codes of 8
 * and 2 bits follow each other; of 16 codes of 4 bits, those with even numbers are in the first word and the others in
 * the second; of 3 bits, the two low ones of all codes come before the high ones. */
INLINE int64_t scales_at(const struct side *s) {
    int64_t chunks = (s->size + LANES - 1) / LANES;
    return s->bits == 3 ? chunks + (chunks + 1) / 2 : chunks * s->bits / 2;
}

/* Convert fp16 numbers in the low bits to floats. */
INLINE vec halves(ivec words) {
    vec size = (vec)((words & isplat(0x7fff)) << 13) * splat(0x1p112f);
    return (vec)((ivec)size | (words & isplat(0x8000)) << 16);
}

/* Gather the word `at` of 16 rows. */
INLINE ivec word_of_rows(const uint8_t *rows, int64_t bytes, int64_t at) {
    int32_t words[LANES];
    for (int64_t i = 0; i < LANES; i++) words[i] = (int32_t)*(const word_at *)(rows + i * bytes + 4 * at);
    return *(const ivec_at *)words;
}

/* Transpose 16 rows to [words][16], one column a row; the rows from `next` on are prefetched meanwhile. */
INLINE void turn_words(const uint8_t *rows, int64_t bytes, const uint8_t *next, int32_t *to) {
    int64_t w = 0, words = bytes / 4;
    for (; w + 8 <= words; w += 8)
        for (int half = 0; half < LANES; half += 8) {
            words8 a[8], b[8];
            for (int i = 0; i < 8; i++) a[i] = *(const words8 *)(rows + (half + i) * bytes + 4 * w);
            for (int i = 0; i < 8; i += 2) {
                b[i] = SHUFFLE(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
                b[i + 1] = SHUFFLE(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
            }
            for (int i = 0; i < 8; i += 4)
                for (int j = 0; j < 2; j++) {
                    a[i + 2 * j] = SHUFFLE(b[i + j], b[i + 2 + j], 0, 1, 8, 9, 4, 5, 12, 13);
                    a[i + 2 * j + 1] = SHUFFLE(b[i + j], b[i + 2 + j], 2, 3, 10, 11, 6, 7, 14, 15);
                }
            for (int i = 0; i < 4; i++) {
                *(words8 *)(to + (w + i) * LANES + half) = SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
                *(words8 *)(to + (w + i + 4) * LANES + half) = SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
            }
        }
    for (; w < words; w++) *(ivec_at *)(to + w * LANES) = word_of_rows(rows, bytes, w);
    for (int64_t b = 0; b < LANES * bytes; b += 64) FETCH(next + b);
}

/* Code `j` of chunk `c` of 16 turned rows. */
INLINE vec turned_codes(const int bits, const int32_t *words, int64_t chunks, int64_t c, const int j) {
#define WORD(at) (*(const uvec_at *)(words + (at) * LANES))
    uvec code;
    if (bits == 8) code = WORD(4 * c + j / 4) >> (8 * (j % 4)) & 255;
    else if (bits == 4) code = WORD(2 * c + j % 2) >> (4 * (j / 2)) & 15;
    else code = WORD(c) >> (2 * j) & 3;
    if (bits == 3) code |= (WORD(chunks + c / 2) >> (uint32_t)(16 * (c % 2) + j) & 1) << 2;
#undef WORD
    return __builtin_convertvector((ivec)code, vec);
}

/* Scores of `n` queries with 16 packed keys: for each group scale (q codes) + zero (sum of q). */
INLINE void score_packed(const int n, const int bits, struct tile *t, const struct side *s, const int32_t *words,
                         int64_t first, float *to) {
    const float *queries = t->packed_queries + first * t->padded, *sums = t->query_sums + first * t->chunks;
    const int32_t *scales = words + scales_at(s) * LANES;
    vec total[3] = {splat(0.0f), splat(0.0f), splat(0.0f)};
    for (int64_t c = 0; c < t->chunks; scales += LANES) {
        vec dot[3] = {splat(0.0f), splat(0.0f), splat(0.0f)};
        ivec both = *(const ivec_at *)scales;
        vec scale = halves(both), zero = halves((ivec)((uvec)both >> 16));
        float sum[3] = {0, 0, 0};
        for (int64_t g = 0; g < s->group && c < t->chunks; g += LANES, c++) {
#pragma clang loop unroll(full)
            for (int j = 0; j < LANES; j++) {
                vec codes = turned_codes(bits, words, t->chunks, c, j);
                for (int i = 0; i < n; i++) dot[i] = FMA(splat(queries[i * t->padded + c * LANES + j]), codes, dot[i]);
            }
            for (int i = 0; i < n; i++) sum[i] += sums[i * t->chunks + c];
        }
        for (int i = 0; i < n; i++) total[i] = FMA(splat(sum[i]), zero, FMA(dot[i], scale, total[i]));
    }
    for (int i = 0; i < n; i++) store(to + i * BLOCK, total[i]);
}

/* 16 codes of a row, from chunk `c` on. */
INLINE vec codes_at(const int bits, const uint8_t *row, int64_t chunks, int64_t c) {
    const ivec by4 = {0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28};
    uvec codes;
    if (bits == 8) return __builtin_convertvector(__builtin_convertvector(*(const bytes_at *)(row + 16 * c), ivec), vec);
    if (bits == 4) codes = (uvec)lsplat(*(const long_at *)(row + 8 * c)) >> (uvec)by4 & 15;
    else codes = (uvec)isplat((int32_t)*(const word_at *)(row + 4 * c)) >> (uvec)(COUNT + COUNT) & 3;
    if (bits == 3) codes |= ((uvec)isplat(*(const short_at *)(row + 4 * chunks + 2 * c)) >> (uvec)COUNT & 1) << 2;
    return __builtin_convertvector((ivec)codes, vec);
}

/* sums [n][vectors * 16] = sums + weights [n][group][16] codes [16 rows] + zeros [n][group]. */
INLINE void add_packed(const int n, const int vectors, const int bits, struct tile *t, const struct side *s,
                       const uint8_t *rows, int64_t first, int64_t c) {
    vec own[3][2];
    int64_t chunks = t->wide / LANES;
    const float *weights[3][2];
    for (int i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++) {
            const float *at = t->weights + ((first + i) * chunks + (c + v) * LANES / s->group) * 2 * LANES;
            own[i][v] = load(t->sums + (first + i) * t->wide + (c + v) * LANES) + splat(at[LANES]);
            weights[i][v] = at;
        }
    for (int64_t j = 0; j < LANES; j++, rows += s->bytes)
        for (int v = 0; v < vectors; v++) {
            vec codes = codes_at(bits, rows, chunks, c + v);
            for (int i = 0; i < n; i++) own[i][v] = FMA(splat(weights[i][v][j]), codes, own[i][v]);
        }
    for (int i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++) store(t->sums + (first + i) * t->wide + (c + v) * LANES, own[i][v]);
}

#define FOR_BITS(call)                                                                                                 \
    switch (s->bits) {                                                                                                 \
    case 8: call(8); break;                                                                                            \
    case 4: call(4); break;                                                                                            \
    case 3: call(3); break;                                                                                            \
    default: call(2);                                                                                                  \
    }

/* The key or value of a token that is read in full precision: of this pass, or one of the newest before it. */
INLINE const float *unpacked(const struct batch *b, const struct layer *l, const struct side *s, const struct tile *t,
                             int64_t head, int64_t token) {
    if (token >= t->length) return s->fresh + (t->start + token - t->length) * s->stride + head * s->size;
    int64_t place = (b->first[t->sequence] - t->length + token) % s->residual;
    return s->recent + ((b->rows[t->sequence] * l->kv_heads + head) * s->residual + place) * s->size;
}

/* Multiply x by the orthonormal Hadamard matrix, in blocks of the largest power of two that divides its size. */
static void hadamard(float *x, int64_t size) {
    int64_t block = size & -size;
    float scale = 1.0f / __builtin_sqrtf((float)block);
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t first = 0; first < size; first += 2 * half)
            for (int64_t d = first; d < first + half; d++) {
                float a = x[d], b = x[d + half];
                x[d] = a + b, x[d + half] = a - b;
            }
    for (int64_t d = 0; d < size; d++) x[d] *= scale;
}

/* The queries for packed keys: turned as they are, and one whose product with a row of `angles` is that of the query with
 * the rotated bias. */
static void turn_query(const struct layer *l, struct tile *t, int64_t i, int64_t head) {
    int64_t half = l->key.size / 2;
    const float *query = t->queries + i * t->padded, *bias = l->bias + head * l->key.size;
    float *turned = t->packed_queries + i * t->padded, *of_bias = t->bias_queries + i * t->padded;
    for (int64_t d = 0; d < t->padded; d++) turned[d] = query[d], of_bias[d] = 0.0f;
    hadamard(turned, l->key.size);
    for (int64_t d = 0; d < half; d++) {
        of_bias[d] = query[d] * bias[d] + query[half + d] * bias[half + d];
        of_bias[half + d] = query[half + d] * bias[d] - query[d] * bias[half + d];
    }
}

/* Add the products of the tile's queries with the biases of 16 keys at these positions to their scores. */
static void add_biases(const struct layer *l, struct tile *t, const int32_t *positions, float *to) {
    const float *rows[LANES];
    int64_t size = l->key.size;
    for (int j = 0; j < LANES; j++) {
        /* Slots behind the last token hold anything. */
        int64_t known = positions[j] >= 0 && positions[j] < l->positions_known ? positions[j] : 0;
        rows[j] = l->angles + known * size;
    }
    for (int64_t i = 0; i < t->count; i++) {
        vec quad[4];
        for (int f = 0; f < 4; f++) {
            vec dot[4];
            for (int j = 0; j < 4; j++) {
                dot[j] = splat(0.0f);
                for (int64_t c = 0; c < size; c += LANES) {
                    const float *at = rows[4 * f + j] + c;
                    vec part = c + LANES <= size ? load(at) : load_part(at, size - c);
                    dot[j] = FMA(load(t->bias_queries + i * t->padded + c), part, dot[j]);
                }
            }
            quad[f] = merge2(merge1(dot[0], dot[1]), merge1(dot[2], dot[3]));
        }
        store(to + i * BLOCK, load(to + i * BLOCK) + merge4(merge3(quad[0], quad[1]), merge3(quad[2], quad[3])));
    }
}

/* Scores of the tile's queries with 16 keys of a packed pool, from `token` on. */
static void packed_keys(const struct batch *b, const struct layer *l, struct tile *t, int64_t head, int64_t token,
                        const uint8_t *rows, const uint8_t *next, float *to) {
    const struct side *s = &l->key;
    int32_t *words = (int32_t *)t->key_copy;
    turn_words(rows, s->bytes, next, words);
    int64_t i = 0;
#define SCORES(bits)                                                                                                   \
    for (; i + 3 <= t->count; i += 3) score_packed(3, bits, t, s, words, i, to + i * BLOCK);                           \
    for (; i < t->count; i++) score_packed(1, bits, t, s, words, i, to + i * BLOCK);
    FOR_BITS(SCORES)
#undef SCORES
    if (l->bias) add_biases(l, t, words + (s->bytes / 4 - 1) * LANES, to);
    int64_t limit = t->visible[t->count - 1], end = token + LANES < limit ? token + LANES : limit;
    for (int64_t k = token < t->recent ? t->recent : token; k < end; k++) {
        const float *key = unpacked(b, l, s, t, head, k);
        for (i = 0; i < t->count; i++) {
            vec dot = splat(0.0f);
            for (int64_t c = 0; c < t->padded; c += LANES) {
                vec part = c + LANES <= s->size ? load(key + c) : load_part(key + c, s->size - c);
                dot = FMA(load(t->queries + i * t->padded + c), part, dot);
            }
            to[i * BLOCK + k - token] = sum(dot);
        }
    }
}

/* Values of a packed pool onto the sums of the tile's queries, by their shares of 16 tokens from `token` on. */
static void packed_values(const struct batch *b, const struct layer *l, struct tile *t, int64_t head, int64_t token,
                          const uint8_t *rows, const uint8_t *next, const float *shares) {
    const struct side *s = &l->value;
    int64_t chunks = t->wide / LANES, first = scales_at(s), limit = t->visible[t->count - 1];
    for (int64_t g = 0; g * s->group < t->wide; g++) {
        ivec both = word_of_rows(rows, s->bytes, first + g);
        vec scale = halves(both), zero = halves((ivec)((uvec)both >> 16));
        ivec packed = isplat((int32_t)token) + COUNT < isplat((int32_t)(t->recent < limit ? t->recent : limit));
        for (int64_t i = 0; i < t->count; i++) {
            vec share = select(packed, load(shares + i * BLOCK), splat(0.0f));
            float *to = t->weights + (i * chunks + g) * 2 * LANES;
            store(to, share * scale);
            to[LANES] = sum(share * zero);
        }
    }
    int64_t i = 0;
#define COLUMNS(n, bits)                                                                                               \
    {                                                                                                                  \
        int64_t c = 0;                                                                                                 \
        for (; c + 2 <= chunks; c += 2) add_packed(n, 2, bits, t, s, rows, i, c);                                      \
        for (; c < chunks; c++) add_packed(n, 1, bits, t, s, rows, i, c);                                              \
    }
#define VALUES(bits)                                                                                                   \
    for (; i + 3 <= t->count; i += 3) COLUMNS(3, bits)                                                                 \
    for (; i < t->count; i++) COLUMNS(1, bits)
    FOR_BITS(VALUES)
#undef VALUES
#undef COLUMNS
    for (int64_t byte = 0; byte < LANES * s->bytes; byte += 64) FETCH(next + byte);
    int64_t end = token + LANES < limit ? token + LANES : limit;
    for (int64_t k = token < t->recent ? t->recent : token; k < end; k++) {
        const float *value = unpacked(b, l, s, t, head, k);
        for (i = 0; i < t->count; i++)
            for (int64_t c = 0; c < t->wide; c += LANES) {
                vec part = c + LANES <= s->size ? load(value + c) : load_part(value + c, s->size - c);
                float *to = t->sums + i * t->wide + c;
                store(to, FMA(splat(shares[i * BLOCK + k - token]), part, load(to)));
            }
    }
}

/* `after`: the slot, counted from this head's first, that is read when this tile is done. A `plain` one is neither packed
 * nor capped, and its rows are whole vectors if they are of `shorts`. */
INLINE void attend_tile(const int plain, const int shorts, const struct batch *b, const struct layer *l,
                        const int32_t *pages, int64_t head, int64_t after, struct tile *t) {
    int64_t limit = t->visible[t->count - 1], size = l->key.size, value_size = l->value.size;
    const char *keys = rows_of(l, &l->key, head), *values = rows_of(l, &l->value, head);
    const int packed_key = !plain && is_packed(&l->key), packed_value = !plain && is_packed(&l->value);
    const int short_key = !plain && is_short(&l->key), short_value = !plain && is_short(&l->value);
    const int32_t *places = l->places ? l->places + head * l->slots : 0;
    const int64_t distance = t->padded < 64 ? AHEAD_SMALL : AHEAD;
    for (int64_t block = 0; block < limit; block += BLOCK) {
        const void *key[QUARTERS], *value[QUARTERS], *next_key[QUARTERS], *next_value[QUARTERS];
        const int32_t *place[QUARTERS];
        int64_t slots[QUARTERS];
        int64_t tokens = limit - block < BLOCK ? limit - block : BLOCK, quarters = (tokens + LANES - 1) / LANES;
        for (int64_t s = 0; s < quarters; s++) {
            slots[s] = slot_of(b, pages, block + s * LANES);
            if (places) place[s] = places + slots[s];
        }
        if (places) {
            ivec any = isplat(0);
            for (int64_t i = 0; i < t->count; i++)
                for (int64_t s = 0; s < quarters; s++) any |= *(const ivec_at *)place[s] > isplat(t->earliest[i]);
            int32_t found = 0;
            for (int i = 0; i < LANES; i++) found |= any[i];
            if (!found && !t->scores) continue;
        }
        for (int64_t s = 0; s < QUARTERS; s++) {
            int64_t ahead = block + distance + s * LANES;
            int64_t next = ahead < limit ? slot_of(b, pages, ahead) : after + (ahead - limit) / LANES * LANES;
            next_key[s] = keys + next * l->key.bytes, next_value[s] = values + next * l->value.bytes;
        }
        for (int64_t s = 0; s < quarters; s++) {
            key[s] = keys + slots[s] * l->key.bytes, value[s] = values + slots[s] * l->value.bytes;
            if (short_key || (size != t->padded && !packed_key)) {
                pad_rows(short_key, key[s], size, t->key_copy + s * LANES * t->padded, t->padded);
                key[s] = t->key_copy + s * LANES * t->padded;
            }
            if (short_value || (value_size != t->wide && !packed_value)) {
                pad_rows(short_value, value[s], value_size, t->value_copy + s * LANES * t->wide, t->wide);
                value[s] = t->value_copy + s * LANES * t->wide;
            }
        }
        if (!packed_key) score_block(shorts, t, key, next_key, t->padded, quarters);
        for (int64_t s = 0; s < quarters && packed_key; s++)
            packed_keys(b, l, t, head, block + s * LANES, key[s], next_key[s], t->shares + s * LANES);
        soften_block(plain, t, block, quarters, places ? place : 0);
        if (!packed_value) {
            value_block(shorts, t, value, next_value, t->wide, tokens);
            continue;
        }
        for (int64_t i = 0; i < t->count; i++)
            for (int64_t c = 0; c < t->wide; c += LANES) {
                float *to = t->sums + i * t->wide + c;
                store(to, load(to) * splat(t->shrink[i]));
            }
        for (int64_t s = 0; s < quarters; s++)
            packed_values(b, l, t, head, block + s * LANES, value[s], next_value[s], t->shares + s * LANES);
    }
}

/* Other tiles apart from plain ones of floats, which would spill registers beside them. */
static __attribute__((noinline)) void attend_other_tile(const struct batch *b, const struct layer *l, const int32_t *pages,
                                                        int64_t head, int64_t after, struct tile *t) {
    attend_tile(0, 0, b, l, pages, head, after, t);
}
static __attribute__((noinline)) void attend_short_tile(const struct batch *b, const struct layer *l, const int32_t *pages,
                                                        int64_t head, int64_t after, struct tile *t) {
    attend_tile(1, 1, b, l, pages, head, after, t);
}

/* Add the weights of the tile's queries, averaged over the heads of the group, to those of earlier tokens. */
static void add_mass(const struct tile *t, int64_t first, const float *totals, float *mass, float share) {
    for (int64_t i = 0; i < t->count; i++) {
        const float *scores = t->scores + i * t->score_stride;
        vec top = splat(t->top[i]), scale = splat(share / totals[i]);
        int64_t s = 0;
        for (; s + LANES <= t->visible[i]; s += LANES)
            store(mass + s, FMA(exponential(load(scores + s) - top), scale, load(mass + s)));
        int64_t rest = t->visible[i] - s;
        if (rest) store_part(mass + s, FMA(exponential(load(scores + s) - top), scale, load_part(mass + s, rest)), rest);
    }
}

/* A row of `bytes` for a key or value: the arithmetic of `engine.storage.pack`, rounding included. */
static void pack_row(const struct side *s, const float *from, uint8_t *to) {
    const float most = (float)((1 << s->bits) - 1), magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds */
    int64_t chunks = (s->size + LANES - 1) / LANES;
    half_at *scales = (half_at *)(to + 4 * scales_at(s));
    for (int64_t i = 0; i < s->bytes; i++) to[i] = 0;
    for (int64_t first = 0; first < s->size; first += s->group, scales += 2) {
        int64_t end = first + s->group < s->size ? first + s->group : s->size;
        float low = from[first], high = low;
        for (int64_t d = first; d < end; d++) {
            low = from[d] < low ? from[d] : low;
            high = from[d] > high ? from[d] : high;
        }
        scales[0] = (_Float16)((high - low) / most), scales[1] = (_Float16)low;
        float scale = (float)scales[0], zero = (float)scales[1];
        /* The last channel fills up the last vector. */
        if (end == s->size) end = chunks * LANES < first + s->group ? chunks * LANES : first + s->group;
        for (int64_t d = first; d < end; d++) {
            float x = ((d < s->size ? from[d] : from[s->size - 1]) - zero) / scale;
            x = x >= 0.0f ? x : 0.0f; /* a group without a range has 0 / 0 */
            uint32_t code = (uint32_t)((x < most ? x : most) + magic - magic);
            int64_t j = d % LANES, c = d / LANES;
            if (s->bits == 8) to[d] = (uint8_t)code;
            else if (s->bits == 4) to[8 * c + 4 * (j % 2) + j / 4] |= (uint8_t)(code << 4 * (j / 2 % 2));
            else to[d / 4] |= (uint8_t)((code & 3) << 2 * (d % 4));
            if (s->bits == 3) to[4 * chunks + d / 8] |= (uint8_t)((code >> 2) << d % 8);
        }
    }
}

/* A row for a key without its bias: the arithmetic of `bits.storage.PackedRows.pack`. `spare` has room for a key. */
static void pack_unbiased(const struct layer *l, const float *from, int64_t head, int32_t position, float *spare, uint8_t *to) {
    int64_t size = l->key.size, half = size / 2;
    const float *bias = l->bias + head * size, *cos = l->angles + position * size, *sin = cos + half;
    for (int64_t d = 0; d < half; d++) {
        spare[d] = from[d] - (bias[d] * cos[d] - bias[half + d] * sin[d]);
        spare[half + d] = from[half + d] - (bias[half + d] * cos[d] + bias[d] * sin[d]);
    }
    hadamard(spare, size);
    pack_row(&l->key, spare, to);
    *(word_at *)(to + l->key.bytes - 4) = (uint32_t)position;
}

/* Write a new token's key or value of one head into row `at` of the pool. */
INLINE void write_row(const struct side *s, int64_t token, int64_t head, int64_t at) {
    const float *from = s->fresh + token * s->stride + head * s->size;
    char *to = (char *)s->pool + at * s->bytes;
    int64_t d = 0;
    if (is_packed(s)) pack_row(s, from, (uint8_t *)to);
    else if (is_short(s))
        for (; d < s->size; d++) ((uint16_t *)to)[d] = (uint16_t)shortened(((const word_at *)from)[d]);
    else {
        for (; d + LANES <= s->size; d += LANES) store((float *)to + d, load(from + d));
        for (; d < s->size; d++) ((float *)to)[d] = from[d];
    }
}

static void write_tokens(const struct batch *b, const struct layer *l, int64_t sequence) {
    const int32_t *pages = b->table + sequence * b->table_width;
    for (int64_t token = b->starts[sequence]; token < b->starts[sequence + 1]; token++) {
        int64_t slot = slot_of(b, pages, b->lengths[sequence] + token - b->starts[sequence]);
        for (int64_t head = 0; head < l->kv_heads; head++) {
            int64_t at = head * l->slots + slot;
            if (l->bias) {
                const float *key = l->key.fresh + token * l->key.stride + head * l->key.size;
                int32_t position = b->first[sequence] + (int32_t)(token - b->starts[sequence]);
                pack_unbiased(l, key, head, position, b->scratch, (uint8_t *)l->key.pool + at * l->key.bytes);
            } else write_row(&l->key, token, head, at);
            write_row(&l->value, token, head, at);
            if (l->places) l->places[at] = l->positions[token];
        }
    }
}

API void kvatlas_paged_attention(const struct batch *b, const struct layer *l) {
    int64_t group = l->heads / l->kv_heads, residual = is_packed(&l->key) ? l->key.residual : l->value.residual;
    struct tile t;
    t.chunks = (l->key.size + LANES - 1) / LANES, t.padded = t.chunks * LANES;
    t.wide = (l->value.size + LANES - 1) / LANES * LANES, t.softcap = (float)l->softcap;
    const int are_floats = !l->key.bits && !l->value.bits;
    const int are_shorts = is_short(&l->key) && is_short(&l->value) && l->key.size == t.padded && l->value.size == t.wide;
    float *scratch = b->scratch;
    t.queries = scratch, scratch += TILE * t.padded;
    t.sums = scratch, scratch += TILE * t.wide;
    t.shares = scratch, scratch += TILE * BLOCK;
    t.parts = scratch, scratch += TILE * LANES;
    t.turned = scratch, scratch += BLOCK * t.padded;
    t.key_copy = scratch, scratch += BLOCK * t.padded;
    t.value_copy = scratch, scratch += BLOCK * t.wide;
    t.query_sums = scratch, scratch += TILE * t.chunks;
    t.weights = scratch, scratch += 2 * TILE * t.wide;
    t.bias_queries = scratch, scratch += TILE * t.padded;
    /* Without biases the same queries are for packed keys as for others. */
    t.packed_queries = t.queries;
    if (l->bias) t.packed_queries = scratch;
    scratch += TILE * t.padded;
    vec scaling = splat((float)l->scaling);
    for (int64_t sequence = 0; sequence < b->sequences; sequence++) {
        int64_t start = b->starts[sequence], queries = (b->starts[sequence + 1] - start) * group;
        int64_t longest = b->lengths[sequence] + b->starts[sequence + 1] - start;
        int32_t watched = l->mass && b->watched ? b->watched[sequence] : -1;
        t.scores = watched < 0 ? 0 : scratch;
        t.score_stride = (longest + BLOCK - 1) / BLOCK * BLOCK;
        write_tokens(b, l, sequence);
        t.sequence = sequence, t.start = start, t.length = b->lengths[sequence];
        const int32_t *pages = b->table + sequence * b->table_width;
        const int32_t *following = sequence + 1 < b->sequences ? pages + b->table_width : pages;
        for (int64_t head = 0; head < l->kv_heads; head++) {
            int64_t after = head + 1 < l->kv_heads ? l->slots + pages[0] * b->page_size
                                                   : following[0] * b->page_size - head * l->slots;
            for (int64_t first = 0; first < queries; first += t.count) {
                /* Each token has its own newest ones. */
                int64_t end = residual ? (first / group + 1) * group : queries;
                t.count = end - first < TILE ? end - first : TILE;
                for (int64_t i = 0; i < t.count; i++) {
                    int64_t token = start + (first + i) / group;
                    const float *query = l->query + token * l->query_stride + (head * group + (first + i) % group) * l->key.size;
                    for (int64_t c = 0; c < t.padded; c += LANES) {
                        vec own = c + LANES <= l->key.size ? load(query + c) : load_part(query + c, l->key.size - c);
                        store(t.queries + i * t.padded + c, own * scaling);
                    }
                    if (l->bias) turn_query(l, &t, i, head);
                    for (int64_t c = 0; c < t.chunks && is_packed(&l->key); c++)
                        t.query_sums[i * t.chunks + c] = sum(load(t.packed_queries + i * t.padded + c * LANES));
                    for (int64_t c = 0; c < t.wide; c += LANES) store(t.sums + i * t.wide + c, splat(0.0f));
                    /* The sink is a score that has been seen. */
                    store(t.parts + i * LANES, splat(0.0f));
                    if (l->sinks) t.parts[i * LANES] = 1.0f;
                    t.top[i] = l->sinks ? l->sinks[head * group + (first + i) % group] : -__FLT_MAX__;
                    t.visible[i] = (int32_t)(b->lengths[sequence] + token - start + 1);
                    t.earliest[i] = l->places ? (int32_t)(l->positions[token] - l->window) : 0;
                }
                t.recent = residual ? t.visible[0] - residual : INT64_MAX;
                if (are_floats && t.softcap == 0.0f) attend_tile(1, 0, b, l, pages, head, after, &t);
                else if (are_shorts && t.softcap == 0.0f) attend_short_tile(b, l, pages, head, after, &t);
                else attend_other_tile(b, l, pages, head, after, &t);
                float totals[TILE];
                for (int64_t i = 0; i < t.count; i++) {
                    int64_t token = start + (first + i) / group;
                    float *out = l->out + (token * l->heads + head * group + (first + i) % group) * l->value.size;
                    totals[i] = sum(load(t.parts + i * LANES));
                    vec scale = splat(1.0f / totals[i]);
                    for (int64_t c = 0; c < t.wide; c += LANES) {
                        vec own = load(t.sums + i * t.wide + c) * scale;
                        if (c + LANES <= l->value.size) store(out + c, own);
                        else store_part(out + c, own, l->value.size - c);
                    }
                }
                if (t.scores)
                    add_mass(&t, first, totals, l->mass + (watched * l->kv_heads + head) * b->watched_width,
                             1.0f / (float)group);
            }
        }
    }
}

/* ---- Normalisation, gates, rotation ---- */

/* y = x / sqrt(mean(x^2) + eps) * weight for rows of `width`. */
API void kvatlas_rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t width, double eps) {
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        vec squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        int64_t k = 0;
        for (; k + 4 * LANES <= width; k += 4 * LANES)
            for (int i = 0; i < 4; i++) squares[i] = FMA(load(x + k + i * LANES), load(x + k + i * LANES), squares[i]);
        for (; k < width; k += LANES) {
            vec own = k + LANES <= width ? load(x + k) : load_part(x + k, width - k);
            squares[0] = FMA(own, own, squares[0]);
        }
        float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)width;
        vec scale = splat(1.0f / __builtin_sqrtf(mean + (float)eps));
        for (k = 0; k + LANES <= width; k += LANES) store(y + k, load(x + k) * scale * load(weight + k));
        if (k < width)
            store_part(y + k, load_part(x + k, width - k) * scale * load_part(weight + k, width - k), width - k);
    }
}

INLINE vec silu(vec a) { return a / (splat(1.0f) + exponential(-a)); }

/* y = silu(a) * b; rows of a and b may lie apart, as halves of one product do. */
API void kvatlas_silu_mul(const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *y, int64_t rows,
                          int64_t width) {
    for (int64_t r = 0; r < rows; r++, a += a_stride, b += b_stride, y += width) {
        int64_t k = 0;
        for (; k + LANES <= width; k += LANES) store(y + k, silu(load(a + k)) * load(b + k));
        if (k < width) store_part(y + k, silu(load_part(a + k, width - k)) * load_part(b + k, width - k), width - k);
    }
}

/* x = x cos + rotate_half(x) sin for the first `heads` of each row, rounded as torch rounds: nothing is fused. */
API void kvatlas_rotate(float *x, int64_t stride, const float *cos, const float *sin, int64_t rows, int64_t heads,
                        int64_t size) {
    int64_t half = size / 2;
    for (int64_t r = 0; r < rows; r++, x += stride, cos += size, sin += size)
        for (int64_t h = 0; h < heads; h++) {
            float *low = x + h * size, *high = low + half;
            int64_t k = 0;
            for (; k + LANES <= half; k += LANES) {
                vec a = load(low + k), b = load(high + k);
                store(low + k, a * load(cos + k) - b * load(sin + k));
                store(high + k, b * load(cos + half + k) + a * load(sin + half + k));
            }
            for (; k < half; k++) {
                float a = low[k], b = high[k];
                low[k] = a * cos[k] - b * sin[k];
                high[k] = b * cos[half + k] + a * sin[half + k];
            }
        }
}

/* ---- A decoder layer of Llama's form ---- */

/* Weights as `kvatlas_linear` takes them. */
struct linear {
    const float *weight, *bias;
    int64_t inputs, outputs, kind;
};

/* The weights of a layer: queries, keys and values are outputs of one product, gate and up of another. */
struct decoder_layer {
    struct linear projections, output, inner, down;
    const float *input_norm, *inner_norm; /* [hidden] */
    double input_eps, inner_eps;
    int64_t rotary_heads, head_size; /* queries and keys to rotate, from the first on; they have equal sizes */
};

/* The tokens of a pass: their hidden states, which each layer replaces, their rotation, and working memory. */
struct pass {
    int64_t tokens;
    const float *cos, *sin; /* [tokens][head_size] */
    float *states;          /* [tokens][hidden] */
    float *normed;          /* [tokens][hidden] */
    float *heads;           /* [tokens][projections.outputs]: queries, keys, values */
    float *seen;            /* [tokens][output.inputs] */
    float *inner;           /* [tokens][inner.outputs] */
    float *gated;           /* [tokens][down.inputs] */
    void *bytes;            /* `kvatlas_byte_words` of the widest inputs in bytes */
};

/* y = x W^T + bias; x is rounded in place if the weights are bfloat16. */
static void apply(const struct linear *l, float *x, float *y, int64_t rows, void *bytes) {
    int64_t words = l->inputs;
    if (l->kind == BYTES || l->kind == BYTES_AT_ONCE) {
        kvatlas_to_bytes(x, l->inputs, rows, l->inputs, bytes, l->kind);
        kvatlas_linear_bytes(bytes, l->weight, l->bias, y, l->outputs, rows, l->inputs, l->outputs, l->kind);
        return;
    }
    if (l->kind != FLOATS) {
        kvatlas_shorten(x, rows, l->inputs);
        words /= 2;
    }
    kvatlas_linear(x, l->inputs, l->weight, l->bias, y, l->outputs, rows, words, l->outputs, l->kind);
}

/* x = x + y */
static void add(float *x, const float *y, int64_t count) {
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) store(x + k, load(x + k) + load(y + k));
    for (; k < count; k++) x[k] += y[k];
}

/* The part of a layer before attention: `heads` from `states`. */
API void kvatlas_project(const struct decoder_layer *d, const struct pass *p) {
    kvatlas_rms_norm(p->states, d->input_norm, p->normed, p->tokens, d->projections.inputs, d->input_eps);
    apply(&d->projections, p->normed, p->heads, p->tokens, p->bytes);
    kvatlas_rotate(p->heads, d->projections.outputs, p->cos, p->sin, p->tokens, d->rotary_heads, d->head_size);
}

/* The part of a layer after attention: what was `seen` and the feed-forward layer are added to `states`. */
API void kvatlas_feed_forward(const struct decoder_layer *d, const struct pass *p) {
    int64_t numbers = p->tokens * d->output.outputs, width = d->down.inputs;
    apply(&d->output, p->seen, p->normed, p->tokens, p->bytes);
    add(p->states, p->normed, numbers);
    kvatlas_rms_norm(p->states, d->inner_norm, p->normed, p->tokens, d->inner.inputs, d->inner_eps);
    apply(&d->inner, p->normed, p->inner, p->tokens, p->bytes);
    kvatlas_silu_mul(p->inner, 2 * width, p->inner + width, 2 * width, p->gated, p->tokens, width);
    apply(&d->down, p->gated, p->normed, p->tokens, p->bytes);
    add(p->states, p->normed, numbers);
}

/* A whole layer; of `l` the new queries, keys and values and the output are set here. */
static void compute_layer(const struct decoder_layer *d, const struct pass *p, const struct batch *b, struct layer *l) {
    kvatlas_project(d, p);
    l->query_stride = l->key.stride = l->value.stride = d->projections.outputs;
    l->query = p->heads;
    l->key.fresh = l->query + l->heads * l->key.size;
    l->value.fresh = l->key.fresh + l->kv_heads * l->key.size;
    l->out = p->seen;
    kvatlas_paged_attention(b, l);
    kvatlas_feed_forward(d, p);
}

/* `count` layers, one after the other. */
API void kvatlas_decoder_layers(const struct decoder_layer *const *d, struct layer *l, int64_t count, const struct pass *p,
                                const struct batch *b) {
    for (int64_t i = 0; i < count; i++) compute_layer(d[i], p, b, l + i);
}

/* ---- Compaction ---- */

/* Copy rows of bytes; most have whole vectors. */
INLINE void copy_row(uint8_t *to, const uint8_t *from, int64_t bytes) {
    int64_t k = 0;
    for (; k + 16 <= bytes; k += 16) *(bytes_at *)(to + k) = *(const bytes_at *)(from + k);
    for (; k < bytes; k++) to[k] = from[k];
}

/* A pool [kv_heads][slots] of rows of `bytes`, and the tokens of a sequence to keep: `kept` [kv_heads][count], or with a
 * `head_stride` of 0 the same for all heads. */
struct kept_pool {
    uint8_t *rows;
    int64_t bytes, slots;
    const int64_t *kept;
    int64_t head_stride;
};

/* True if each of the `count` tokens goes to an earlier slot of the same pages, or stays where it is. */
static int moves_forward(const int64_t *kept, int64_t count, const int32_t *before, const int32_t *after, int64_t page_size) {
    for (int64_t page = 0; page * page_size < count; page++)
        if (before[page] != after[page]) return 0;
    for (int64_t k = 1; k < count; k++)
        if (kept[k] <= kept[k - 1]) return 0;
    return 1;
}

/* Move the `count` kept tokens of a sequence from the pages `before` to the pages `after`, of `page_size` slots. Both may
 * share pages: unless tokens move forward, a head is read as a whole into `scratch` [count] rows before it is written. */
API void kvatlas_compact(const struct kept_pool *pools, int64_t pool_count, int64_t kv_heads, int64_t count,
                         const int32_t *before, const int32_t *after, int64_t page_size, uint8_t *scratch) {
    const struct batch b = {.page_size = page_size};
    for (const struct kept_pool *pool = pools; pool < pools + pool_count; pool++)
        for (int64_t head = 0; head < kv_heads; head++) {
            uint8_t *rows = pool->rows + head * pool->slots * pool->bytes;
            const int64_t *kept = pool->kept + head * pool->head_stride;
            if (moves_forward(kept, count, before, after, page_size)) {
                for (int64_t k = 0; k < count; k++)
                    if (kept[k] != k)
                        copy_row(rows + slot_of(&b, after, k) * pool->bytes,
                                 rows + slot_of(&b, before, kept[k]) * pool->bytes, pool->bytes);
                continue;
            }
            for (int64_t k = 0; k < count; k++)
                copy_row(scratch + k * pool->bytes, rows + slot_of(&b, before, kept[k]) * pool->bytes, pool->bytes);
            for (int64_t k = 0; k < count; k++)
                copy_row(rows + slot_of(&b, after, k) * pool->bytes, scratch + k * pool->bytes, pool->bytes);
        }
}

/* ---- The largest numbers ---- */

/* True if a lane is above `floor`, or no number. */
INLINE int any_above(vec v, float floor) {
    ivec above = (v > splat(floor)) | (v != v);
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= above[i];
    return found;
}

/* Put `x` into the `count` falling `values`, of which at most `most` stay. Returns their new number. */
static int64_t insert(float x, int64_t place, int64_t count, int64_t most, float *values, int64_t *places) {
    if (count == most) count--;
    int64_t at = count;
    for (; at > 0 && values[at - 1] < x; at--) values[at] = values[at - 1], places[at] = places[at - 1];
    values[at] = x, places[at] = place;
    return count + 1;
}

/* The `most` largest of the numbers x [width], falling, and their places. Returns 0 if two of them are equal, so that their
 * order is open, or one is no number. */
static int find_largest(const float *x, int64_t width, int64_t most, float *values, int64_t *places) {
    int64_t count = 0;
    for (int64_t k = 0; k < width; k += LANES) {
        int64_t end = k + LANES < width ? k + LANES : width;
        if (count == most && end == k + LANES && !any_above(load(x + k), values[most - 1])) continue;
        for (int64_t i = k; i < end; i++) {
            if (x[i] != x[i]) return 0;
            if (count < most || x[i] > values[most - 1]) count = insert(x[i], i, count, most, values, places);
        }
    }
    for (int64_t i = 1; i < count; i++)
        if (values[i] == values[i - 1]) return 0;
    return 1;
}

/* ---- Noise ---- */

#define WORDS 8 /* lanes of 64 bits that hold words of 32 */

/* Philox4x32-10, first word of counter (c0, c1, c2, 0); every argument below 2^32. */
INLINE lvec philox(uint64_t key, lvec c0, lvec c1, lvec c2) {
    const lvec low = lsplat(0xFFFFFFFFu);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    lvec c3 = lsplat(0);
    for (int i = 0; i < 10; i++) {
        lvec p0 = (c0 & low) * lsplat(0xD2511F53u), p1 = (c2 & low) * lsplat(0xCD9E8D57u);
        c0 = (p1 >> 32) ^ c1 ^ lsplat(k0), c1 = p1 & low;
        c2 = (p0 >> 32) ^ c3 ^ lsplat(k1), c3 = p0 & low;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

/* (word + 0.5) / 2^32. */
INLINE dvec uniform_of(int64_t stream, int64_t position, lvec token, int64_t choice) {
    lvec word = philox((uint64_t)stream, lsplat((uint64_t)position), token, lsplat((uint64_t)choice));
    /* A double whose last bits are the word, less 2^52: the word exactly. */
    dvec number = (dvec)(word | lsplat(0x4330000000000000u)) - (dvec)lsplat(0x4330000000000000u);
    return (number + 0.5) * 0x1p-32;
}

/* out [rows][width] = (word + 0.5) / 2^32 of stream, position, token and choice; tokens null: 0, 1, 2 ... in every row;
 * choices null: 0. */
API void kvatlas_uniform(const int64_t *streams, const int64_t *positions, const int64_t *choices, const int64_t *tokens,
                         int64_t token_stride, double *out, int64_t rows, int64_t width) {
    const lvec count = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < width; k += WORDS) {
            int64_t left = width - k < WORDS ? width - k : WORDS;
            lvec token = lsplat((uint64_t)k) + count;
            if (tokens) {
                uint64_t part[WORDS] = {0};
                for (int64_t i = 0; i < left; i++) part[i] = (uint64_t)tokens[r * token_stride + k + i];
                token = *(const lvec_at *)part;
            }
            dvec number = uniform_of(streams[r], positions[r], token, choices ? choices[r] : 0);
            if (left == WORDS) *(dvec_at *)(out + r * width + k) = number;
            else
                for (int64_t i = 0; i < left; i++) out[r * width + k + i] = number[i];
        }
}

/* ---- Sampling ---- */

#define MOST_SORTED 256 /* as many candidates are put into their order one by one */

/* Natural logarithms and exponentials of 8 numbers, to about one unit in the last place, with fdlibm's constants. */
static const double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;
#define WHOLE 0x1.8p52 /* adding it rounds to a whole number, which is in the last bits */

/* Of numbers up to 0; exactly 0 below -700. */
INLINE dvec exponentials(dvec x) {
    dvec t = x * 1.44269504088896338700 + WHOLE, n = t - WHOLE;
    dvec high = x - n * LN2_HIGH, low = n * LN2_LOW, r = high - low, z = r * r;
    dvec p = z * 4.13813679705723846039e-08 - 1.65339022054652515390e-06;
    p = p * z + 6.61375632143793436117e-05;
    p = p * z - 2.77777777770155933842e-03;
    p = p * z + 1.66666666666666019037e-01;
    dvec c = r - p * z;
    dvec y = 1.0 - ((low - r * c / (2.0 - c)) - high);
    return (dvec)(((lvec)y + ((lvec)t << 52)) & (lvec)(x >= -700.0));
}

/* Of normal numbers above 0. */
INLINE dvec logarithms(dvec x) {
    /* x = 2^n (1 + f), 1 + f from sqrt(1/2) to sqrt(2). Signed numbers keep their sign in a shift. */
    typedef int64_t slvec __attribute__((vector_size(64)));
    slvec exponent = ((slvec)x - 0x3FE6A09E667F3BCD) >> 52;
    dvec f = (dvec)((slvec)x - (exponent << 52)) - 1.0;
    dvec n = (dvec)(exponent + 0x4338000000000000) - WHOLE;
    dvec s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
    dvec p = z * 1.479819860511658591e-01 + 1.531383769920937332e-01;
    p = p * z + 1.818357216161805012e-01;
    p = p * z + 2.222219843214978396e-01;
    p = p * z + 2.857142874366239149e-01;
    p = p * z + 3.999999999940941908e-01;
    p = p * z + 6.666666666666735130e-01;
    return n * LN2_HIGH - ((half - (s * (half + p * z) + n * LN2_LOW)) - f);
}

/* The next tokens `sampled` [rows] from logits x [rows][width]: of the `top` largest, divided by the temperature, those
 * stay before which the shares do not reach top_p; the one with the largest sum of logit and Gumbel noise is drawn.
 * Returns 0 if the order of the largest is open, or one is no finite number. */
API int64_t kvatlas_sample(const float *x, int64_t stride, int64_t rows, int64_t width, int64_t top, double temperature,
                           double top_p, const int64_t *streams, const int64_t *positions, int64_t *sampled) {
    for (int64_t r = 0; r < rows; r++, x += stride) {
        float values[MOST_SORTED];
        int64_t places[MOST_SORTED];
        double scores[MOST_SORTED], shares[MOST_SORTED], noise[MOST_SORTED];
        if (!find_largest(x, width, top + 1, values, places)) return 0;
        if (values[0] > __FLT_MAX__ || values[top] < -__FLT_MAX__) return 0;

        for (int64_t k = 0; k < MOST_SORTED && k < top + WORDS; k++) {
            scores[k] = (double)values[k < top ? k : top] / temperature;
            if (k >= top) places[k] = 0;
        }
        double total = 0.0, reached = 0.0, highest = -__DBL_MAX__;
        for (int64_t k = 0; k < top; k += WORDS) {
            dvec numbers = exponentials(*(const dvec_at *)(scores + k) - scores[0]);
            *(dvec_at *)(shares + k) = numbers;
            lvec tokens = *(const lvec_at *)(places + k);
            *(dvec_at *)(noise + k) = -logarithms(-logarithms(uniform_of(streams[r], positions[r], tokens, 0)));
        }
        for (int64_t k = 0; k < top; k++) total += shares[k];
        /* Where nothing else stays, as with a top_p of 0. */
        sampled[r] = places[0];
        for (int64_t k = 0; k < top; k++) {
            double share = shares[k] / total;
            reached += share;
            /* A token stays if the likelier ones before it do not reach top_p; the likeliest always stays. */
            if (top_p < 1.0 && reached - share >= top_p) continue;
            if (scores[k] + noise[k] > highest) highest = scores[k] + noise[k], sampled[r] = places[k];
        }
    }
    return 1;
}
