/* Shared index: the daemon writes, clients that map it read-only find blocks without a call.

   A table serves one segment. A cell is 32 bits of a key's hash above the slot's number in the
   segment + 1; a key stands in one of two buckets of eight, in the emptier one once its first is
   nearly full. A slot has an entry of 64 bytes with its key. An entry is good while its generation is the slot's live one: removing a
   block bumps that, so that nothing is ever removed here. A slot that is written again takes the
   place of its old cell.

   An entry's sequence is odd while it is written. A reader that meets that, or a change, tries
   again a few times and then gives up: its caller asks the daemon. Every number read is checked
   before it is used as a place. */
#include "kvh.h"

#include <stdatomic.h>
#include <string.h>

#define BUCKET 8
#define WINDOW (2 * BUCKET)
#define CROWDED 6
#define GROUP 32
#define TRIES 64
#define KEY_WORDS 4
#define VERIFY 0x80000000u
#define NOWHERE UINT32_MAX

typedef struct {
    _Atomic uint64_t version; /* generation above sequence */
    _Atomic uint64_t place;   /* next shard's slot + 1 above space and VERIFY */
    _Atomic uint64_t sum[2];
    _Atomic uint64_t key[KEY_WORDS];
} entry_t;

typedef struct {
    _Atomic uint64_t *cells;
    entry_t *entries;
    const _Atomic uint32_t *generations; /* of all segments' slots */
    uint64_t seed;
    uint64_t slab_bytes, slot_bytes_min, segment_bytes;
    uint32_t cell_count; /* a power of two, at least WINDOW */
    uint32_t first_slot, slot_count, stride;
    uint32_t segment;
} kvh_table;

/* EXTENT_DTYPE. */
typedef struct __attribute__((packed)) {
    uint32_t slot;
    uint16_t segment, flags;
    uint64_t offset;
    uint32_t length, generation;
    uint64_t sum[2];
} extent_t;

typedef struct {
    uint64_t word[KEY_WORDS];
} words_t;

typedef struct {
    uint32_t generation, next, flags;
    uint64_t sum[2];
} seen_t;

KVH_EXPORT int64_t kvh_table_put(const kvh_table *t, uint32_t space, int64_t count, int64_t shards,
                                 const int64_t *slots, const uint8_t *keys, int64_t key_bytes,
                                 const uint8_t *sums, const uint8_t *flags);
KVH_EXPORT int64_t kvh_table_find(const kvh_table *t, uint32_t space, int64_t count,
                                  int64_t shards, const uint8_t *keys, int64_t key_bytes,
                                  uint32_t length, extent_t *extents, uint8_t *found);

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline uint64_t plain(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static inline words_t words_of(const uint8_t *key, int64_t key_bytes) {
    words_t words = {{0}};
    if (key_bytes == sizeof words)
        memcpy(&words, key, sizeof words);
    else
        memcpy(&words, key, (size_t)key_bytes);
    return words;
}

/* Fold the 128 bits of a product: each bit of both factors counts in each bit of the result. */
static inline uint64_t fold(uint64_t one, uint64_t other) {
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t hash_of(const kvh_table *t, uint32_t space, const words_t *words) {
    static const uint64_t by[KEY_WORDS] = {0x9E3779B97F4A7C15u, 0xBB67AE8584CAA73Bu,
                                           0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u};
    uint64_t mixed = t->seed + (uint64_t)space * 0x510E527FADE682D1u;
    for (int i = 0; i < KEY_WORDS; i++)
        mixed = fold(mixed ^ words->word[i], by[i]);
    return fold(mixed ^ t->seed, 0x9B05688C2B3E6C1Fu);
}

static inline uint32_t first_bucket(const kvh_table *t, uint64_t hash) {
    return (uint32_t)hash & (t->cell_count - 1) & ~(uint32_t)(BUCKET - 1);
}

static inline uint32_t second_bucket(const kvh_table *t, uint64_t hash) {
    uint64_t other = (hash >> 32) * 0x9E3779B97F4A7C15u >> 20;
    return (uint32_t)other & (t->cell_count - 1) & ~(uint32_t)(BUCKET - 1);
}

/* One of the WINDOW cells that may hold a key. */
static inline _Atomic uint64_t *cell_of(const kvh_table *t, uint64_t hash, int step) {
    uint32_t bucket = step < BUCKET ? first_bucket(t, hash) : second_bucket(t, hash);
    return &t->cells[bucket + (uint32_t)step % BUCKET];
}

static inline uint32_t live(const kvh_table *t, uint32_t slot) {
    return atomic_load_explicit(&t->generations[t->first_slot + slot], memory_order_acquire);
}

/* Whether a slot's entry is of its present block. */
static int current(const kvh_table *t, uint32_t slot) {
    return (uint32_t)(plain(&t->entries[slot].version) >> 32) == live(t, slot);
}

/* -- the daemon ------------------------------------------------------------------------------- */

static void drop_cell(const kvh_table *t, uint32_t slot) {
    entry_t *entry = &t->entries[slot];
    uint32_t space = (uint32_t)plain(&entry->place) & ~VERIFY;
    if (!space)
        return;
    words_t words;
    for (int i = 0; i < KEY_WORDS; i++)
        words.word[i] = plain(&entry->key[i]);
    uint64_t hash = hash_of(t, space, &words);
    uint64_t cell = (hash >> 32) << 32 | (slot + 1);
    for (int step = 0; step < WINDOW; step++) {
        _Atomic uint64_t *at = cell_of(t, hash, step);
        if (plain(at) == cell) {
            atomic_store_explicit(at, 0, memory_order_relaxed);
            return;
        }
    }
}

/* Look for an empty cell in a bucket. Returns the number of cells in use. */
static int room_in(const kvh_table *t, uint32_t bucket, _Atomic uint64_t **room) {
    int used = 0;
    for (int i = 0; i < BUCKET; i++) {
        _Atomic uint64_t *at = &t->cells[bucket + (uint32_t)i];
        if (plain(at))
            used++;
        else
            *room = at;
    }
    return used;
}

/* A cell of a block that is gone, or NULL. */
static _Atomic uint64_t *gone_cell(const kvh_table *t, uint64_t hash) {
    for (int step = 0; step < WINDOW; step++) {
        _Atomic uint64_t *at = cell_of(t, hash, step);
        uint32_t slot = (uint32_t)plain(at) - 1;
        if (slot >= t->slot_count || !current(t, slot))
            return at;
    }
    return NULL;
}

static int put_cell(const kvh_table *t, uint64_t hash, uint32_t slot) {
    _Atomic uint64_t *room = NULL;
    int used = room_in(t, first_bucket(t, hash), &room);
    if (used >= CROWDED) {
        _Atomic uint64_t *other = NULL;
        if (room_in(t, second_bucket(t, hash), &other) < used)
            room = other;
    }
    if (!room)
        room = gone_cell(t, hash);
    if (!room)
        return 0;
    atomic_store_explicit(room, (hash >> 32) << 32 | (slot + 1), memory_order_release);
    return 1;
}

static void put_entry(const kvh_table *t, uint32_t slot, uint32_t next, uint32_t space,
                      const words_t *words, const uint8_t *sum) {
    entry_t *entry = &t->entries[slot];
    uint32_t sequence = (uint32_t)plain(&entry->version);
    sequence += 1 + (sequence & 1); /* to odd, also after a writer that ended in between */
    uint64_t checksum[2];
    memcpy(checksum, sum, sizeof checksum);
    atomic_store_explicit(&entry->version, sequence, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&entry->place, (uint64_t)next << 32 | space, memory_order_relaxed);
    for (int i = 0; i < 2; i++)
        atomic_store_explicit(&entry->sum[i], checksum[i], memory_order_relaxed);
    for (int i = 0; i < KEY_WORDS; i++)
        atomic_store_explicit(&entry->key[i], words->word[i], memory_order_relaxed);
    uint64_t version = (uint64_t)live(t, slot) << 32 | (uint32_t)(sequence + 1);
    atomic_store_explicit(&entry->version, version, memory_order_release);
}

/* Publish blocks that may be served: `slots` (count, shards) in the segment, heads first; `keys`
   (count); `sums` and `flags` are columns by absolute slot number. Returns the number of blocks
   that found a cell; readers ask the daemon for the others. */
int64_t kvh_table_put(const kvh_table *t, uint32_t space, int64_t count, int64_t shards,
                      const int64_t *slots, const uint8_t *keys, int64_t key_bytes,
                      const uint8_t *sums, const uint8_t *flags) {
    int64_t placed = 0;
    for (int64_t base = 0; base < count; base += GROUP) {
        int64_t end = base + GROUP < count ? base + GROUP : count;
        words_t words[GROUP];
        uint64_t hash[GROUP];
        for (int64_t i = base; i < end; i++) {
            words[i - base] = words_of(keys + i * key_bytes, key_bytes);
            hash[i - base] = hash_of(t, space, &words[i - base]);
            __builtin_prefetch(cell_of(t, hash[i - base], 0), 1);
            __builtin_prefetch(&t->entries[slots[i * shards] - t->first_slot], 1);
        }
        for (int64_t i = base; i < end; i++) {
            const int64_t *mine = slots + i * shards;
            uint32_t next = 0;
            for (int64_t shard = shards - 1; shard >= 0; shard--) {
                uint32_t slot = (uint32_t)(mine[shard] - t->first_slot);
                uint32_t own = shard ? 0 : space | (flags[mine[0]] & 2 ? VERIFY : 0);
                drop_cell(t, slot);
                put_entry(t, slot, next, own, &words[i - base], sums + 16 * mine[shard]);
                next = slot + 1;
            }
            placed += put_cell(t, hash[i - base], (uint32_t)(mine[0] - t->first_slot));
        }
    }
    return placed;
}

/* -- clients ---------------------------------------------------------------------------------- */

/* Read a slot's entry if it has this key and space (0: of any key), and is current. Returns -1 for
   an entry that is being written all the time. */
static inline int see(const kvh_table *t, uint32_t slot, uint32_t space, const words_t *words,
                      seen_t *seen) {
    const entry_t *entry = &t->entries[slot];
    for (int attempt = 0; attempt < TRIES; attempt++) {
        uint64_t before = atomic_load_explicit(&entry->version, memory_order_acquire);
        if (!(before & 1)) {
            uint64_t place = plain(&entry->place), differs = 0;
            if (space)
                for (int i = 0; i < KEY_WORDS; i++)
                    differs |= plain(&entry->key[i]) ^ words->word[i];
            seen->sum[0] = plain(&entry->sum[0]);
            seen->sum[1] = plain(&entry->sum[1]);
            atomic_thread_fence(memory_order_acquire);
            if (plain(&entry->version) == before) {
                seen->generation = (uint32_t)(before >> 32);
                seen->next = (uint32_t)(place >> 32);
                seen->flags = (uint32_t)place & VERIFY;
                /* Never written: its sequence is 0. */
                return (uint32_t)before && !differs && ((uint32_t)place & ~VERIFY) == space &&
                       live(t, slot) == seen->generation;
            }
        }
        relax();
    }
    return -1;
}

static int emit(const kvh_table *t, uint32_t slot, const seen_t *seen, uint32_t flags,
                uint32_t length, extent_t *found) {
    uint64_t size = (length + t->slot_bytes_min - 1) / t->slot_bytes_min * t->slot_bytes_min;
    uint64_t offset = slot / t->stride * t->slab_bytes + slot % t->stride * size;
    if (offset + length > t->segment_bytes)
        return 0;
    found->slot = t->first_slot + slot;
    found->segment = (uint16_t)t->segment;
    found->flags = (uint16_t)(1 | (flags ? 2 : 0));
    found->offset = offset;
    found->length = length;
    found->generation = seen->generation;
    memcpy(found->sum, seen->sum, sizeof found->sum);
    return 1;
}

/* Write the extents of a block, given its head. Returns -1 as `see` does. */
static inline int take(const kvh_table *t, uint32_t slot, uint32_t space, const words_t *words,
                       int64_t shards, uint32_t length, extent_t *found) {
    seen_t seen;
    int got = see(t, slot, space, words, &seen);
    if (got <= 0)
        return got;
    uint32_t flags = seen.flags;
    if (!emit(t, slot, &seen, flags, length, found))
        return 0;
    for (int64_t shard = 1; shard < shards; shard++) {
        uint32_t next = seen.next - 1;
        if (next >= t->slot_count)
            return 0;
        got = see(t, next, 0, words, &seen);
        if (got <= 0)
            return got;
        if (!emit(t, next, &seen, flags, length, found + shard))
            return 0;
    }
    /* The head last: shards that were read before are of the same block. */
    return live(t, slot) == found->generation;
}

/* The next slot with this tag from a step on, or NOWHERE. */
static inline uint32_t candidate(const kvh_table *t, uint64_t hash, int *step) {
    for (; *step < WINDOW; ++*step) {
        uint64_t cell = atomic_load_explicit(cell_of(t, hash, *step), memory_order_acquire);
        uint32_t slot = (uint32_t)cell - 1;
        if (cell >> 32 == hash >> 32 && slot < t->slot_count)
            return slot;
    }
    return NOWHERE;
}

static uint32_t search(const kvh_table *t, uint32_t space, const words_t *words, uint64_t hash,
                       int64_t shards, uint32_t length, extent_t *extents, int step,
                       int *doubt) {
    for (;; step++) {
        uint32_t slot = candidate(t, hash, &step);
        if (slot == NOWHERE)
            return slot;
        int got = take(t, slot, space, words, shards, length, extents);
        if (got > 0)
            return slot;
        *doubt |= got < 0;
    }
}

/* Find keys and write the extents of those that are here to their rows of `extents`, of shape
   (count, shards). `found` (count) is set to 1 for those; it comes as zeros. Without it the search
   ends at the first key that is not here. Returns the number of keys found, or -1 less that number
   if an entry that is being written all the time may have one of the others. */
int64_t kvh_table_find(const kvh_table *t, uint32_t space, int64_t count, int64_t shards,
                       const uint8_t *keys, int64_t key_bytes, uint32_t length,
                       extent_t *extents, uint8_t *found) {
    int64_t done = 0, hits = 0;
    uint32_t last = NOWHERE, step = 0;
    int doubt = 0;
    while (done < count) {
        /* Blocks of a chain mostly lie in a row: no hash, and memory in order. */
        while (step && done < count) {
            words_t words = words_of(keys + done * key_bytes, key_bytes);
            uint32_t slot = last + step;
            if (slot >= t->slot_count ||
                take(t, slot, space, &words, shards, length, extents + done * shards) <= 0)
                break;
            if (found)
                found[done] = 1;
            last = slot;
            hits++;
            done++;
        }
        /* The others in groups, so that their cache misses overlap. The first group is small: its
           first key may be the only one that is looked for, or begin a row. */
        words_t words[GROUP];
        uint64_t hash[GROUP];
        uint32_t slots[GROUP];
        int steps[GROUP];
        int64_t most = done ? GROUP : 2, here = count - done < most ? count - done : most;
        for (int64_t i = 0; i < here; i++) {
            words[i] = words_of(keys + (done + i) * key_bytes, key_bytes);
            hash[i] = hash_of(t, space, &words[i]);
            __builtin_prefetch(cell_of(t, hash[i], 0));
            __builtin_prefetch(cell_of(t, hash[i], BUCKET));
        }
        for (int64_t i = 0; i < here; i++) {
            steps[i] = 0;
            slots[i] = candidate(t, hash[i], &steps[i]);
            if (slots[i] == NOWHERE)
                continue;
            __builtin_prefetch(&t->entries[slots[i]]);
            __builtin_prefetch(&t->generations[t->first_slot + slots[i]]);
        }
        step = 0;
        for (int64_t i = 0; i < here; i++, done++) {
            uint32_t slot = NOWHERE;
            if (slots[i] != NOWHERE)
                slot = search(t, space, &words[i], hash[i], shards, length,
                              extents + done * shards, steps[i], &doubt);
            if (slot == NOWHERE) {
                if (!found)
                    return doubt ? -1 - hits : hits;
                step = 0;
                last = NOWHERE;
                continue;
            }
            if (found)
                found[done] = 1;
            hits++;
            step = last != NOWHERE && slot - last <= (uint32_t)shards ? slot - last : 0;
            last = slot;
        }
    }
    return doubt ? -1 - hits : hits;
}
