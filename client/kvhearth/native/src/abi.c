/* Identity of the library: the loader compares it with its own before any other call. */
#include "kvh.h"

KVH_EXPORT int64_t kvh_abi(void);
KVH_EXPORT const char *kvh_sources(void);

/* Number of the interface between Python and C, from build.py. */
int64_t kvh_abi(void) { return KVH_ABI; }

/* Digest of the sources that this library was compiled from, from build.py. */
const char *kvh_sources(void) { return KVH_SOURCES; }
