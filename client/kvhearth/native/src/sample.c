/* Sampling of keys by their hash, for reuse distances (core/reuse.py has the same in numpy). */
#include "kvh.h"

#include <string.h>

/* What is sampled and where it goes; as in native/sample.py. */
typedef struct {
    uint64_t by, last;
    uint64_t *hashes;
    int64_t *owners;
} Sampling;

KVH_EXPORT int64_t kvh_sample(const Sampling *how, const unsigned char *const *blobs,
                              const int64_t *sizes, int64_t blob_count, int64_t key_bytes);

#define RUN 8

static inline uint64_t hash_of(const unsigned char *key, int64_t key_bytes, uint64_t by) {
    uint64_t head, tail;
    memcpy(&head, key, 8);
    memcpy(&tail, key + key_bytes - 8, 8);
    return (head + tail) * by;
}

static int64_t sample(const Sampling *how, const unsigned char *first, int64_t left,
                      int64_t key_bytes, int64_t number, int64_t found) {
    uint64_t by = how->by, last = how->last, hashes[RUN];
    while (left) {
        /* Few keys are sampled: most runs have none, and are only looked at. */
        int64_t run = left < RUN ? left : RUN;
        const unsigned char *key = first + (left -= run) * key_bytes;
        int any = 0;
        if (run == RUN) {
            for (int at = 0; at < RUN; at++) {
                hashes[at] = hash_of(key + at * key_bytes, key_bytes, by);
                any |= hashes[at] <= last;
            }
        } else {
            for (int64_t at = 0; at < run; at++) {
                hashes[at] = hash_of(key + at * key_bytes, key_bytes, by);
                any |= hashes[at] <= last;
            }
        }
        for (int64_t at = any ? run - 1 : -1; at >= 0; at--) {
            if (hashes[at] <= last) {
                how->hashes[found] = hashes[at];
                how->owners[found++] = number;
            }
        }
    }
    return found;
}

/* Writes the hashes of at most `last`, blob by blob, each from its last key to its first, with the
   blobs' numbers, and returns how many there are. Both outputs have room for all keys. */
int64_t kvh_sample(const Sampling *how, const unsigned char *const *blobs, const int64_t *sizes,
                   int64_t blob_count, int64_t key_bytes) {
    int64_t found = 0;
    for (int64_t number = 0; number < blob_count; number++) {
        found = sample(how, blobs[number], sizes[number] / key_bytes, key_bytes, number, found);
    }
    return found;
}
