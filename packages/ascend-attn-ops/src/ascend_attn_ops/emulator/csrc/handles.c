/* The set of live handles: open addressing on the pointer. */
#include <pthread.h>
#include <stdlib.h>

#include "opapi.h"

struct entry {
    const void *handle;
    enum handle_kind kind; /* HANDLE_NONE with a handle: removed */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;
static size_t capacity, taken; /* taken counts removed entries, too */
static uint64_t live[HANDLE_KINDS];

static size_t place(const struct entry *table, size_t size, const void *handle)
{
    size_t index = ((uintptr_t)handle >> 4) * 0x9E3779B97F4A7C15u % size;
    while (table[index].handle != NULL && table[index].handle != handle) {
        index = (index + 1) % size;
    }
    return index;
}

static bool grow(void)
{
    size_t size = 1024;
    for (int kind = 0; kind < HANDLE_KINDS; kind++) {
        size += 4 * live[kind];
    }
    struct entry *table = calloc(size, sizeof *table);
    if (table == NULL) {
        return false;
    }
    taken = 0;
    for (size_t i = 0; i < capacity; i++) {
        if (entries[i].kind != HANDLE_NONE) {
            table[place(table, size, entries[i].handle)] = entries[i];
            taken++;
        }
    }
    free(entries);
    entries = table;
    capacity = size;
    return true;
}

bool emulator_add_handle(const void *handle, enum handle_kind kind)
{
    pthread_mutex_lock(&lock);
    bool room = 2 * (taken + 1) < capacity || grow();
    if (room) {
        struct entry *entry = &entries[place(entries, capacity, handle)];
        taken += entry->handle == NULL;
        *entry = (struct entry){handle, kind};
        live[kind]++;
    }
    pthread_mutex_unlock(&lock);
    return room;
}

bool emulator_remove_handle(const void *handle, enum handle_kind kind)
{
    bool known = false;
    pthread_mutex_lock(&lock);
    if (capacity != 0) {
        struct entry *entry = &entries[place(entries, capacity, handle)];
        known = handle != NULL && entry->handle == handle && entry->kind == kind;
        if (known) {
            entry->kind = HANDLE_NONE;
            live[kind]--;
        }
    }
    pthread_mutex_unlock(&lock);
    return known;
}

enum handle_kind emulator_handle_kind(const void *handle)
{
    enum handle_kind kind = HANDLE_NONE;
    pthread_mutex_lock(&lock);
    if (capacity != 0 && handle != NULL) {
        const struct entry *entry = &entries[place(entries, capacity, handle)];
        kind = entry->handle == handle ? entry->kind : HANDLE_NONE;
    }
    pthread_mutex_unlock(&lock);
    return kind;
}

uint64_t emulator_live_handles(int kind)
{
    return kind <= HANDLE_NONE || kind >= HANDLE_KINDS ? 0 : live[kind];
}

uint64_t emulator_handle_size(int kind)
{
    switch (kind) {
    case HANDLE_TENSOR: return sizeof(struct aclTensor);
    case HANDLE_SCALAR: return sizeof(struct aclScalar);
    default: return sizeof(struct array);
    }
}
