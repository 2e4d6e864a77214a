/* Copies of blocks, and their checksums while the bytes pass through the registers.
 *
 * A block is read once and written once: hashing a copy afterwards would read it again, by then from
 * a slower cache.
 */
#include <stdatomic.h>
#include <string.h>

#include "xxh3.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define KVH_X86 1
#else
#define KVH_X86 0
#endif

enum { STRIPES = 16, CHUNK = STRIPE * STRIPES, LANES = 8 };
enum { PORTABLE, AVX2, AVX512 };

/* How far ahead of a streaming copy its source is fetched: measured, see docs/adr/0026. */
enum { AHEAD = 4096 };

typedef struct {
    uint64_t lanes[LANES];
    size_t total;   /* bytes of the whole input */
    size_t stripes; /* stripes taken so far */
    size_t held;    /* bytes of an unfinished stripe */
    uint8_t part[STRIPE];
} hash_state;

/* Takes whole chunks of 1 KiB: copies them unless dst is NULL, adds them to lanes unless those are
 * NULL. With ahead, the stores bypass the caches, and as many bytes from there are fetched; what is
 * copied is then the same length from dst + skew on, which must be a multiple of 64. */
typedef void chunk_mover(uint64_t *lanes, uint8_t *dst, const uint8_t *src, size_t chunks,
                         const uint8_t *ahead, size_t skew);

static uint8_t *pointer(int64_t address) { return (uint8_t *)(uintptr_t)address; }

/* -- portable ------------------------------------------------------------------------------- */

static void add_stripe(uint64_t *lanes, const uint8_t *src, const uint8_t *key) {
    for (int i = 0; i < LANES; i++) {
        uint64_t value = read64(src + 8 * i), mixed = value ^ read64(key + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (mixed & 0xffffffffu) * (mixed >> 32);
    }
}

static void scramble(uint64_t *lanes) {
    for (int i = 0; i < LANES; i++) {
        uint64_t lane = lanes[i];
        lane ^= lane >> 47;
        lane ^= read64(secret + SECRET - STRIPE + 8 * i);
        lanes[i] = lane * PRIME32_1;
    }
}

static void move_portable(uint64_t *lanes, uint8_t *dst, const uint8_t *src, size_t chunks,
                          const uint8_t *ahead, size_t skew) {
    if (dst) memcpy(dst + (ahead ? skew : 0), src + (ahead ? skew : 0), chunks * CHUNK);
    for (size_t n = 0; lanes && n < chunks; n++, src += CHUNK) {
        for (int i = 0; i < STRIPES; i++) add_stripe(lanes, src + i * STRIPE, secret + 8 * i);
        scramble(lanes);
    }
}

#if KVH_X86

/* -- AVX-512 -------------------------------------------------------------------------------- */

#define TARGET_512 __attribute__((target("avx512f")))
#define INLINE_512 TARGET_512 static inline __attribute__((always_inline))

INLINE_512 __m512i mix_512(__m512i sum, __m512i value, __m512i key) {
    __m512i mixed = _mm512_xor_si512(value, key);
    __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
    __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
    return _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
}

INLINE_512 __m512i scramble_512(__m512i sum) {
    __m512i key = _mm512_loadu_si512(secret + SECRET - STRIPE);
    __m512i prime = _mm512_set1_epi64(PRIME32_1);
    __m512i mixed = _mm512_ternarylogic_epi64(sum, _mm512_srli_epi64(sum, 47), key, 0x96);
    __m512i low = _mm512_mul_epu32(mixed, prime);
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
    return _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
}

/* The flags are constants at each call, so that the compiler makes a loop for each case. */
INLINE_512 void chunks_512(uint64_t *lanes, uint8_t *dst, const uint8_t *src, size_t chunks,
                           const uint8_t *ahead, size_t skew, const int hashed, const int copied,
                           const int stream) {
    __m512i sum = hashed ? _mm512_loadu_si512(lanes) : _mm512_setzero_si512();
    for (size_t at = 0; at < chunks * CHUNK; at += CHUNK) {
#pragma GCC unroll 16
        for (int i = 0; i < STRIPES; i++) {
            size_t here = at + i * STRIPE;
            if (stream) {
                _mm_prefetch((const char *)ahead + here, _MM_HINT_T0);
                __m512i value = _mm512_loadu_si512(src + skew + here);
                _mm512_stream_si512((void *)(dst + skew + here), value);
            }
            if (!hashed) continue;
            __m512i value = _mm512_loadu_si512(src + here);
            if (copied && !stream) _mm512_storeu_si512(dst + here, value);
            sum = mix_512(sum, value, _mm512_loadu_si512(secret + 8 * i));
        }
        if (hashed) sum = scramble_512(sum);
    }
    if (hashed) _mm512_storeu_si512(lanes, sum);
}

TARGET_512 static void move_512(uint64_t *lanes, uint8_t *dst, const uint8_t *src, size_t chunks,
                                const uint8_t *ahead, size_t skew) {
    if (!dst) chunks_512(lanes, dst, src, chunks, ahead, skew, 1, 0, 0);
    else if (lanes && ahead) chunks_512(lanes, dst, src, chunks, ahead, skew, 1, 1, 1);
    else if (lanes) chunks_512(lanes, dst, src, chunks, ahead, skew, 1, 1, 0);
    else if (ahead) chunks_512(lanes, dst, src, chunks, ahead, skew, 0, 1, 1);
    else memcpy(dst, src, chunks * CHUNK);
}

/* -- AVX2 ----------------------------------------------------------------------------------- */

#define TARGET_256 __attribute__((target("avx2")))
#define INLINE_256 TARGET_256 static inline __attribute__((always_inline))

INLINE_256 __m256i mix_256(__m256i sum, __m256i value, __m256i key) {
    __m256i mixed = _mm256_xor_si256(value, key);
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, swapped));
}

INLINE_256 __m256i scramble_256(__m256i sum, const uint8_t *key) {
    __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    __m256i mixed = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((const __m256i *)key));
    __m256i low = _mm256_mul_epu32(mixed, prime);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

INLINE_256 __m256i load_256(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }

INLINE_256 void chunks_256(uint64_t *lanes, uint8_t *dst, const uint8_t *src, size_t chunks,
                           const uint8_t *ahead, size_t skew, const int hashed, const int copied,
                           const int stream) {
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int half = 0; hashed && half < 2; half++) sums[half] = load_256(lanes + 4 * half);
    for (size_t at = 0; at < chunks * CHUNK; at += CHUNK) {
#pragma GCC unroll 32
        for (int i = 0; i < 2 * STRIPES; i++) {
            size_t here = at + i * 32;
            if (stream) {
                if (i % 2 == 0) _mm_prefetch((const char *)ahead + here, _MM_HINT_T0);
                __m256i value = load_256(src + skew + here);
                _mm256_stream_si256((__m256i *)(dst + skew + here), value);
            }
            if (!hashed) continue;
            __m256i value = load_256(src + here);
            if (copied && !stream) _mm256_storeu_si256((__m256i *)(dst + here), value);
            sums[i % 2] = mix_256(sums[i % 2], value, load_256(secret + i / 2 * 8 + i % 2 * 32));
        }
        for (int half = 0; hashed && half < 2; half++)
            sums[half] = scramble_256(sums[half], secret + SECRET - STRIPE + 32 * half);
    }
    for (int half = 0; hashed && half < 2; half++)
        _mm256_storeu_si256((__m256i *)(lanes + 4 * half), sums[half]);
}

TARGET_256 static void move_256(uint64_t *lanes, uint8_t *dst, const uint8_t *src, size_t chunks,
                                const uint8_t *ahead, size_t skew) {
    if (!dst) chunks_256(lanes, dst, src, chunks, ahead, skew, 1, 0, 0);
    else if (lanes && ahead) chunks_256(lanes, dst, src, chunks, ahead, skew, 1, 1, 1);
    else if (lanes) chunks_256(lanes, dst, src, chunks, ahead, skew, 1, 1, 0);
    else if (ahead) chunks_256(lanes, dst, src, chunks, ahead, skew, 0, 1, 1);
    else memcpy(dst, src, chunks * CHUNK);
}

#endif

/* -- fragments ------------------------------------------------------------------------------ */

static chunk_mover *mover_of(int64_t level) {
#if KVH_X86
    if (level >= AVX512) return move_512;
    if (level >= AVX2) return move_256;
#endif
    (void)level;
    return move_portable;
}

/* Adds bytes that are no whole chunks, up to the end of the input's last stripe but one: the last is
 * always taken apart. Returns the number of bytes that it took. */
static size_t add_some(hash_state *state, const uint8_t *src, size_t size) {
    size_t taken = 0, last = (state->total - 1) / STRIPE;
    while (taken < size) {
        size_t step = STRIPE - state->held;
        if (step > size - taken) step = size - taken;
        memcpy(state->part + state->held, src + taken, step);
        state->held += step;
        taken += step;
        if (state->held < STRIPE) break;
        state->held = 0;
        if (state->stripes >= last) break;
        add_stripe(state->lanes, state->part, secret + 8 * (state->stripes % STRIPES));
        if (++state->stripes % STRIPES == 0) {
            scramble(state->lanes);
            break; /* from here on, whole chunks may follow */
        }
    }
    return taken;
}

static void finish(const hash_state *state, const uint8_t *last_stripe, uint8_t *sum) {
    uint64_t lanes[LANES], folded[2];
    memcpy(lanes, state->lanes, sizeof lanes);
    add_stripe(lanes, last_stripe, secret + SECRET - STRIPE - 7);
    uint64_t size = state->total;
    uint64_t starts[2] = {size * PRIME64_1, ~(size * PRIME64_2)};
    const uint8_t *keys[2] = {secret + 11, secret + SECRET - STRIPE - 11};
    for (int half = 0; half < 2; half++) {
        uint64_t value = starts[half];
        for (int i = 0; i < LANES; i += 2)
            value += fold_product(lanes[i] ^ read64(keys[half] + 8 * i),
                                  lanes[i + 1] ^ read64(keys[half] + 8 * i + 8));
        folded[half] = avalanche(value);
    }
    write_sum(sum, folded[0], folded[1]);
}

/* Moves whole chunks past the caches: all but the last, whose stores may be unaligned. */
static void stream_chunks(uint64_t *lanes, uint8_t *dst, const uint8_t *src, size_t chunks,
                          const uint8_t *next, chunk_mover *move) {
    size_t skew = (size_t)(-(uintptr_t)dst % STRIPE), streamed = skew ? chunks - 1 : chunks;
    size_t near = streamed < AHEAD / CHUNK ? streamed : AHEAD / CHUNK, far = streamed - near;
    if (skew) memcpy(dst, src, skew);
    if (far) move(lanes, dst, src, far, src + AHEAD, skew);
    dst += far * CHUNK;
    src += far * CHUNK;
    /* Beyond this fragment's end lies what nobody reads: the next one is fetched instead. */
    if (near) move(lanes, dst, src, near, next, skew);
    if (skew) move(lanes, dst + near * CHUNK, src + near * CHUNK, 1, NULL, 0);
}

/* Moves one fragment; state is NULL where no checksum is wanted, dst where no copy is, next where
 * the stores go through the caches. */
static void move_fragment(hash_state *state, uint8_t *dst, const uint8_t *src, size_t size,
                          const uint8_t *next, chunk_mover *move) {
    uint64_t *lanes = state ? state->lanes : NULL;
    while (size) {
        size_t chunks = size / CHUNK, taken;
        if (state) {
            /* The input's last stripe is not added like the others. */
            size_t most = ((state->total - 1) / STRIPE - state->stripes) / STRIPES;
            if (state->held || state->stripes % STRIPES) most = 0;
            if (chunks > most) chunks = most;
        }
        if (chunks) {
            taken = chunks * CHUNK;
            if (dst && next) stream_chunks(lanes, dst, src, chunks, next, move);
            else move(lanes, dst, src, chunks, NULL, 0);
            if (state) state->stripes += chunks * STRIPES;
        } else {
            taken = state ? add_some(state, src, size) : size;
            if (dst) memcpy(dst, src, taken);
        }
        src += taken;
        size -= taken;
        if (dst) dst += taken;
    }
}

/* Collects the last bytes of a block from its fragments. */
static void collect(const int64_t *src, const int64_t *lengths, int64_t parts, uint8_t *tail,
                    size_t wanted) {
    for (int64_t part = parts - 1; part >= 0 && wanted; part--) {
        size_t size = (size_t)lengths[part], step = size < wanted ? size : wanted;
        wanted -= step;
        memcpy(tail + wanted, pointer(src[part]) + size - step, step);
    }
}

/* Copies and sums one block; next is the address that is read after it, or NULL as above. */
static void move_block(const int64_t *dst, const int64_t *src, const int64_t *lengths,
                       int64_t parts, size_t total, uint8_t *sum, const uint8_t *next,
                       chunk_mover *move) {
    const int hashed = sum && total > KVH_SHORT;
    hash_state state = {.lanes = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2,
                                  PRIME64_5, PRIME32_1},
                        .total = total};
    for (int64_t part = 0; (dst || hashed) && part < parts; part++) {
        const uint8_t *after = part + 1 < parts ? pointer(src[part + 1]) : next;
        move_fragment(hashed ? &state : NULL, dst ? pointer(dst[part]) : NULL, pointer(src[part]),
                      (size_t)lengths[part], next ? after : NULL, move);
    }
    if (!sum) return;
    uint8_t tail[KVH_SHORT];
    collect(src, lengths, parts, tail, hashed ? STRIPE : total);
    if (hashed) finish(&state, tail, sum);
    else kvh_sum_short(tail, total, sum);
}

static size_t sum_of(const int64_t *lengths, int64_t parts) {
    size_t total = 0;
    for (int64_t part = 0; part < parts; part++) total += (size_t)lengths[part];
    return total;
}

/* Ends a call: its stores are visible, and its reads done, before the caller compares generations
 * again. Streaming stores are not ordered by later plain ones, such as the one that tells of them. */
static void settle(void) {
#if KVH_X86
    _mm_sfence();
#endif
    atomic_thread_fence(memory_order_seq_cst);
}

KVH_EXPORT int64_t kvh_level(void);
KVH_EXPORT void kvh_move_blocks(const int64_t *dst, const int64_t *src, const int64_t *lengths,
                                int64_t blocks, int64_t parts, uint8_t *sums,
                                const uint32_t *generations, const int64_t *slots,
                                const uint32_t *wanted, uint8_t *moved, int64_t stream,
                                int64_t level);
KVH_EXPORT void kvh_move_page(const int64_t *layout, int64_t parts, int64_t page, int64_t slot,
                              int64_t to_slot, uint8_t *sum, int64_t stream, int64_t level);

/* Returns the best instruction set of this processor: 2 AVX-512, 1 AVX2, 0 neither. */
int64_t kvh_level(void) {
#if KVH_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return AVX512;
    if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
    return PORTABLE;
}

/* Copies and sums blocks of `parts` fragments each.
 *
 * dst, src: addresses, blocks x parts; without dst nothing is copied. lengths: bytes of each part.
 * sums: 16 bytes a block, or NULL. generations: live counters of all slots, or NULL; a block whose
 * counter differs from `wanted` is not moved. moved: 1 for each block that was, else 0. stream:
 * stores bypass the caches. level: at most kvh_level().
 */
void kvh_move_blocks(const int64_t *dst, const int64_t *src, const int64_t *lengths, int64_t blocks,
                     int64_t parts, uint8_t *sums, const uint32_t *generations,
                     const int64_t *slots, const uint32_t *wanted, uint8_t *moved, int64_t stream,
                     int64_t level) {
    size_t total = sum_of(lengths, parts);
    for (int64_t block = 0; block < blocks; block++) {
        if (generations) {
            const _Atomic uint32_t *live = (const _Atomic uint32_t *)generations + slots[block];
            if (atomic_load_explicit(live, memory_order_acquire) != wanted[block]) {
                moved[block] = 0;
                continue;
            }
        }
        const int64_t *from = src + block * parts;
        const uint8_t *next = pointer(from[block + 1 < blocks ? parts : 0]);
        move_block(dst ? dst + block * parts : NULL, from, lengths, parts, total,
                   sums ? sums + block * SUM : NULL, stream && dst ? next : NULL,
                   mover_of(level));
        moved[block] = 1;
    }
    settle();
}

/* Copies one page into a slot or back, and sums it: like kvh_move_blocks, with everything that it
 * needs in a few numbers, because the code that makes arrays is out of the caches after a pause.
 *
 * layout: of each part the address in page 0, then of each the distance from page to page, then of
 * each the bytes. slot: address; the parts follow each other there. sum: 16 bytes, or NULL.
 */
void kvh_move_page(const int64_t *layout, int64_t parts, int64_t page, int64_t slot,
                   int64_t to_slot, uint8_t *sum, int64_t stream, int64_t level) {
    const int64_t *strides = layout + parts, *lengths = strides + parts;
    int64_t pages[parts], slots[parts];
    for (int64_t part = 0; part < parts; part++) {
        pages[part] = layout[part] + page * strides[part];
        slots[part] = slot;
        slot += lengths[part];
    }
    const int64_t *src = to_slot ? pages : slots;
    move_block(to_slot ? slots : pages, src, lengths, parts, sum_of(lengths, parts), sum,
               stream ? pointer(src[0]) : NULL, mover_of(level));
    settle();
}
