/* XXH3 with 128 bits and seed 0 of inputs of at most 240 bytes: each class of lengths its own way. */
#include "xxh3.h"

typedef struct {
    uint64_t low, high;
} pair;

static uint32_t read32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static pair product_of(uint64_t left, uint64_t right) {
    unsigned __int128 product = (unsigned __int128)left * right;
    return (pair){(uint64_t)product, (uint64_t)(product >> 64)};
}

/* The last steps of the 64-bit variant of the older XXH64. */
static uint64_t avalanche_64(uint64_t value) {
    value = (value ^ (value >> 33)) * PRIME64_2;
    value = (value ^ (value >> 29)) * PRIME64_3;
    return value ^ (value >> 32);
}

static pair sum_0(void) {
    return (pair){avalanche_64(read64(secret + 64) ^ read64(secret + 72)),
                  avalanche_64(read64(secret + 80) ^ read64(secret + 88))};
}

static pair sum_1_to_3(const uint8_t *src, size_t size) {
    uint32_t low = (uint32_t)src[0] << 16 | (uint32_t)src[size / 2] << 24 | src[size - 1] |
                   (uint32_t)size << 8;
    uint32_t swapped = __builtin_bswap32(low), high = swapped << 13 | swapped >> 19;
    return (pair){avalanche_64(low ^ (uint64_t)(read32(secret) ^ read32(secret + 4))),
                  avalanche_64(high ^ (uint64_t)(read32(secret + 8) ^ read32(secret + 12)))};
}

static pair sum_4_to_8(const uint8_t *src, size_t size) {
    uint64_t input = read32(src) + ((uint64_t)read32(src + size - 4) << 32);
    pair sum = product_of(input ^ read64(secret + 16) ^ read64(secret + 24), PRIME64_1 + (size << 2));
    sum.high += sum.low << 1;
    sum.low ^= sum.high >> 3;
    sum.low = (sum.low ^ (sum.low >> 35)) * PRIME_MX2;
    sum.low ^= sum.low >> 28;
    sum.high = avalanche(sum.high);
    return sum;
}

static pair sum_9_to_16(const uint8_t *src, size_t size) {
    uint64_t first = read64(src), last = read64(src + size - 8);
    uint64_t low_key = read64(secret + 32) ^ read64(secret + 40);
    uint64_t high_key = read64(secret + 48) ^ read64(secret + 56);
    pair mixed = product_of(first ^ last ^ low_key, PRIME64_1);
    mixed.low += (uint64_t)(size - 1) << 54;
    last ^= high_key;
    mixed.high += last + (last & 0xffffffffu) * (PRIME32_2 - 1);
    mixed.low ^= __builtin_bswap64(mixed.high);
    pair sum = product_of(mixed.low, PRIME64_2);
    sum.high += mixed.high * PRIME64_2;
    return (pair){avalanche(sum.low), avalanche(sum.high)};
}

static uint64_t mix_16(const uint8_t *src, const uint8_t *key) {
    return fold_product(read64(src) ^ read64(key), read64(src + 8) ^ read64(key + 8));
}

static pair mix_32(pair sum, const uint8_t *first, const uint8_t *second, const uint8_t *key) {
    sum.low += mix_16(first, key);
    sum.low ^= read64(second) + read64(second + 8);
    sum.high += mix_16(second, key + 16);
    sum.high ^= read64(first) + read64(first + 8);
    return sum;
}

static pair finish_mixed(pair sum, size_t size) {
    uint64_t high = sum.low * PRIME64_1 + sum.high * PRIME64_4 + size * PRIME64_2;
    return (pair){avalanche(sum.low + sum.high), 0 - avalanche(high)};
}

static pair sum_17_to_128(const uint8_t *src, size_t size) {
    pair sum = {size * PRIME64_1, 0};
    for (size_t i = (size - 1) / 32 + 1; i-- > 0;)
        sum = mix_32(sum, src + 16 * i, src + size - 16 * (i + 1), secret + 32 * i);
    return finish_mixed(sum, size);
}

static pair sum_129_to_240(const uint8_t *src, size_t size) {
    pair sum = {size * PRIME64_1, 0};
    for (size_t i = 0; i < 4; i++)
        sum = mix_32(sum, src + 32 * i, src + 32 * i + 16, secret + 32 * i);
    sum = (pair){avalanche(sum.low), avalanche(sum.high)};
    for (size_t i = 4; i < size / 32; i++)
        sum = mix_32(sum, src + 32 * i, src + 32 * i + 16, secret + 3 + 32 * (i - 4));
    sum = mix_32(sum, src + size - 16, src + size - 32, secret + 136 - 17 - 16);
    return finish_mixed(sum, size);
}

static pair sum_of(const uint8_t *src, size_t size) {
    if (size == 0) return sum_0();
    if (size <= 3) return sum_1_to_3(src, size);
    if (size <= 8) return sum_4_to_8(src, size);
    if (size <= 16) return sum_9_to_16(src, size);
    if (size <= 128) return sum_17_to_128(src, size);
    return sum_129_to_240(src, size);
}

void kvh_sum_short(const uint8_t *src, size_t size, uint8_t *sum) {
    pair found = sum_of(src, size);
    write_sum(sum, found.low, found.high);
}
