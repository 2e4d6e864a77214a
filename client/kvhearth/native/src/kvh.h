/* Declarations that all sources of the module share. */
#ifndef KVH_H
#define KVH_H

#include <stddef.h>
#include <stdint.h>

/* Everything else stays hidden, so that no name clashes with another library's. */
#define KVH_EXPORT __attribute__((visibility("default")))

#endif
