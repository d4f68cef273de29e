/* Runs every kernel on fixed inputs and prints a digest of the bits: the same for every target. */
#include "kernels.c"

/* Without a C library too, which would take minutes to compile for another target. */
static void call(long number, long a, const void *b, long c) {
#if defined(__x86_64__)
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x2 __asm__("x2") = c;
    register const void *x1 __asm__("x1") = b;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
#endif
}
#if defined(__x86_64__)
enum { WRITE = 1, EXIT = 60 };
#else
enum { WRITE = 64, EXIT = 93 };
#endif

static char memory[64 << 20] __attribute__((aligned(64)));
static int64_t used = 0;
static void *zeros(int64_t bytes) {
    void *at = memory + used;
    used += (bytes + 127) / 64 * 64;
    return at;
}

static uint64_t state = 1;
static float number(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(state >> 32) * 0x1p-29f;
}
static float *numbers(int64_t count) {
    float *made = zeros(count * 4);
    for (int64_t i = 0; i < count; i++) made[i] = number();
    return made;
}
/* Words of two bfloat16 numbers: those of `number` as they are would be infinite or none at times. */
static float *pairs(int64_t count) {
    float *made = numbers(2 * count);
    kvatlas_shorten(made, 1, 2 * count);
    return made;
}
static void digest(const char *name, const void *bits, int64_t bytes) {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < bytes; i++) hash = (hash ^ ((const uint8_t *)bits)[i]) * 1099511628211u;
    char line[32];
    int n = 0;
    while (*name) line[n++] = *name++;
    line[n++] = ' ';
    for (int i = 60; i >= 0; i -= 4) line[n++] = "0123456789abcdef"[hash >> i & 15];
    line[n++] = '\n';
    call(WRITE, 1, line, n);
}

enum { KV = 2, PAGES = 16, PAGE = 48, TOKENS = 26, SEQUENCES = 3, GROUP = 32, RESIDUAL = 5 };

/* Keys or values; of packed ones the cached tokens are zeros. */
static struct side side(int64_t size, int64_t bits) {
    struct side made = {size, KV * size, numbers(TOKENS * KV * size)};
    made.bits = bits, made.bytes = size * (bits == 16 ? 2 : 4);
    if (bits && bits < 16) {
        made.group = GROUP, made.residual = RESIDUAL;
        made.bytes = 4 * (((size + LANES - 1) / LANES * bits + 1) / 2 + (size + GROUP - 1) / GROUP);
        made.recent = numbers(SEQUENCES * KV * RESIDUAL * size);
    }
    made.pool = bits ? zeros(KV * PAGES * PAGE * made.bytes) : numbers(KV * PAGES * PAGE * size);
    return made;
}

static void attention(int64_t size, int64_t group, int64_t window, int64_t bits) {
    int32_t table[SEQUENCES][5] = {{3, 1, 7, 0, 2}, {4, 9, 5, 6, 8}, {11, 10, 12, 13, 15}}, starts[] = {0, 1, 6, 26};
    int32_t lengths[] = {200, 30, 0}, watched[] = {0, -1, 1}, positions[TOKENS], *places = zeros(4 * (KV * PAGES * PAGE));
    int32_t rows[] = {0, 1, 2};
    for (int i = 0; i < TOKENS; i++) positions[i] = 2 * i;
    float *out = zeros(4 * (TOKENS * KV * group * size)), *mass = zeros(4 * (2 * KV * 240));
    struct batch b = {SEQUENCES, PAGE, 5, 240, &table[0][0], starts, lengths, watched, rows, lengths};
    b.scratch = zeros(4 * (kvatlas_attention_scratch(size, 240, 1)));
    struct layer l = {KV * group, KV, PAGES * PAGE, numbers(TOKENS * KV * group * size), KV * group * size};
    l.key = side(size, bits), l.value = side(size, bits), l.out = out, l.mass = mass, l.scaling = 0.1;
    if (window) l.places = places, l.positions = positions, l.window = window;
    if (group == 4) l.sinks = numbers(KV * group), l.softcap = 30.0;
    kvatlas_paged_attention(&b, &l);
    digest("attention", out, TOKENS * KV * group * size * 4), digest("mass", mass, 2 * KV * 240 * 4);
}

static struct linear random_layer(enum kind kind, int64_t inputs, int64_t outputs) {
    int64_t panels = (outputs + LANES - 1) / LANES;
    float *weights = kind == PAIRS ? pairs(panels * inputs / 2 * LANES) : numbers(panels * inputs * LANES);
    return (struct linear){weights, numbers(panels * LANES), inputs, outputs, kind};
}

/* Weights in bytes: codes of 1 to 255, and scales of about a hundredth. */
static uint8_t *byte_weights(int64_t inputs, int64_t outputs) {
    int64_t groups = (outputs + LANES - 1) / LANES * (inputs / GROUP_OF_BYTES);
    uint8_t *made = zeros(groups * WEIGHT_BYTES);
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t i = 0; i < CODE_BYTES; i++) made[g * WEIGHT_BYTES + i] = (uint8_t)(128 + (int)(number() * 31));
        for (int64_t i = 0; i < LANES; i++)
            *(half_at *)(made + g * WEIGHT_BYTES + CODE_BYTES + 2 * i) = (_Float16)(0.01f + 0.001f * number());
    }
    return made;
}

/* Linear layers in bytes of rows that fill tiles or do not. */
static void bytes(void) {
    for (int64_t rows = 1; rows < 37; rows += rows < 20 ? 1 : 8) {
        float *x = numbers(rows * 96), *y = zeros(4 * rows * 70);
        void *codes = zeros(4 * kvatlas_byte_words(rows, 96));
        kvatlas_to_bytes(x, 96, rows, 96, codes, BYTES);
        kvatlas_linear_bytes(codes, byte_weights(96, 70), numbers(80), y, 70, rows, 96, 70, BYTES);
        digest("bytes", y, rows * 280);
    }
}

/* The parts of a decoder layer beside attention, and a compaction of a pool of its states. */
static void decoder_layer(enum kind kind) {
    enum { ROWS = 6, HIDDEN = 40, HEAD = 12, HEADS = 4, INNER = 20 };
    struct linear projections = random_layer(kind, HIDDEN, HEADS * HEAD), output = random_layer(kind, 2 * HEAD, HIDDEN);
    struct linear inner = random_layer(kind, HIDDEN, 2 * INNER), down = random_layer(kind, INNER, HIDDEN);
    struct decoder_layer d = {projections, output, inner, down, numbers(HIDDEN), numbers(HIDDEN), 1e-6, 1e-5, 3, HEAD};
    struct pass p = {ROWS, numbers(ROWS * HEAD), numbers(ROWS * HEAD), numbers(ROWS * HIDDEN)};
    p.normed = zeros(4 * ROWS * HIDDEN), p.heads = zeros(4 * ROWS * HEADS * HEAD), p.seen = numbers(ROWS * 2 * HEAD);
    p.inner = zeros(4 * ROWS * 2 * INNER), p.gated = zeros(4 * ROWS * INNER);
    kvatlas_project(&d, &p), digest("projections", p.heads, 4 * ROWS * HEADS * HEAD);
    kvatlas_feed_forward(&d, &p), digest("states", p.states, 4 * ROWS * HIDDEN);
    int64_t kept[] = {0, 2, 3};
    int32_t before[] = {2, 1}, after[] = {1, 0};
    struct kept_pool pool = {(uint8_t *)p.states, 4 * HIDDEN, ROWS, kept, 0};
    kvatlas_compact(&pool, 1, 1, 3, before, after, 2, zeros(3 * 4 * HIDDEN));
    digest("compaction", p.states, 4 * ROWS * HIDDEN);
}

#if defined(__x86_64__)
__attribute__((force_align_arg_pointer))
#endif
void _start(void) {
    for (int64_t size = 16; size <= 128; size += 28)
        for (int64_t group = 1; group < 9; group += 3)
            for (int64_t bits = 0; bits < 17; bits += bits ? bits : 2) attention(size, group, size % 3 ? 0 : 9, bits);
    for (int64_t rows = 1; rows < 14; rows++) {
        float *y = zeros(4 * (rows * 70)), *x = numbers(rows * 75);
        const float *weights = numbers(5 * 75 * 16), *bias = numbers(80);
        kvatlas_linear(x, 75, weights, bias, y, 70, rows, 75, 70, FLOATS), digest("linear", y, rows * 280);
        kvatlas_linear(pairs(rows * 75), 75, pairs(5 * 75 * 16), bias, y, 70, rows, 75, 70, PAIRS), digest("pairs", y, rows * 280);
        kvatlas_rms_norm(x, numbers(75), y, rows - 1, 75, 1e-6), digest("norm", y, (rows - 1) * 300);
        kvatlas_silu_mul(x, 75, x + 30, 75, y, rows, 45), digest("gate", y, rows * 180);
        kvatlas_rotate(x, 75, numbers(rows * 36), numbers(rows * 36), rows, 2, 36), digest("rotation", x, rows * 300);
        int64_t *sampled = zeros(8 * rows), *streams = zeros(8 * rows), *positions = zeros(8 * rows);
        for (int64_t r = 0; r < rows; r++) streams[r] = r * 7919, positions[r] = r;
        kvatlas_sample(x, 75, rows, 75, 20, 0.6, 0.95, streams, positions, sampled), digest("sampled", sampled, rows * 8);
    }
    for (int64_t rows = 5; rows < 18; rows += 4) {
        float *y = zeros(4 * (rows * 20)), *x = numbers(rows * 600);
        kvatlas_linear(x, 600, numbers(2 * 600 * 16), 0, y, 20, rows, 600, 20, FLOATS), digest("blocks", y, rows * 80);
    }
    decoder_layer(FLOATS), decoder_layer(PAIRS), bytes();
    int64_t streams[] = {5, 1ll << 61}, places[] = {7, 1 << 30};
    for (int i = 0; i < 99; i++) {
        double curves[2 * WORDS];
        *(dvec_at *)curves = exponentials((dvec){0} - 0.37 * i), *(dvec_at *)(curves + WORDS) = logarithms((dvec){0} + 0.01 + 0.3 * i);
        digest("curves", curves, sizeof curves);
    }
    double noise[2 * 21];
    kvatlas_uniform(streams, places, 0, 0, 0, noise, 2, 21), digest("noise", noise, sizeof noise);
    call(EXIT, 0, 0, 0);
}
