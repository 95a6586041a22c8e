/* Device and host memory: ordinary memory of this process, with limits and a list of what exists.
 * New device memory up to POISON_LIMIT is filled with 0xFF, NaN in every float format, so that
 * reading what nobody wrote shows. Larger blocks stay untouched pages, so that a cache of many GB
 * costs only what is used. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "acl/acl.h"
#include "emulator.h"

#define ALIGNMENT 512
#define POISON_LIMIT ((size_t)32 << 20)

struct block {
    char *start;
    size_t size;
    enum memory_kind kind;
    int device;
    bool owned; /* false for memory mapped into a reserved range */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static size_t block_count, block_capacity;
static uint64_t used[MAX_DEVICES];

static bool append(struct block block)
{
    if (block_count == block_capacity) {
        size_t capacity = block_capacity ? 2 * block_capacity : 64;
        struct block *grown = realloc(blocks, capacity * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        blocks = grown;
        block_capacity = capacity;
    }
    blocks[block_count++] = block;
    if (block.kind == MEMORY_DEVICE) {
        used[block.device] += block.size;
    }
    return true;
}

static bool fits(const struct block *block)
{
    return block->kind == MEMORY_HOST ||
           used[block->device] + block->size <= emulator_device_memory();
}

static aclError out_of_memory(const struct block *block)
{
    return emulator_refuse(
        ACL_ERROR_RT_MEMORY_ALLOCATION,
        "device %d: %zu bytes asked for, %llu of %llu in use", block->device, block->size,
        (unsigned long long)used[block->device], (unsigned long long)emulator_device_memory());
}

static aclError keep(struct block block)
{
    aclError error = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!fits(&block) || !append(block)) {
        error = out_of_memory(&block);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* Takes the block that starts at `address` off the list. */
static bool forget(const void *address, enum memory_kind kind, struct block *found)
{
    bool known = false;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < block_count && !known; i++) {
        if (blocks[i].start == (const char *)address && blocks[i].kind == kind) {
            *found = blocks[i];
            blocks[i] = blocks[--block_count];
            known = true;
        }
    }
    if (known && kind == MEMORY_DEVICE) {
        used[found->device] -= found->size;
    }
    pthread_mutex_unlock(&lock);
    return known;
}

enum memory_kind emulator_memory_kind(const void *address, size_t *left)
{
    enum memory_kind kind = MEMORY_UNKNOWN;
    const char *wanted = address;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < block_count; i++) {
        if (wanted >= blocks[i].start && wanted < blocks[i].start + blocks[i].size) {
            kind = blocks[i].kind;
            if (left != NULL) {
                *left = (size_t)(blocks[i].start + blocks[i].size - wanted);
            }
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return kind;
}

uint64_t emulator_used_memory(int device)
{
    return device < 0 || device >= MAX_DEVICES ? 0 : used[device];
}

uint64_t emulator_live_allocations(int kind)
{
    uint64_t count = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < block_count; i++) {
        count += (int)blocks[i].kind == kind;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

static aclError allocate(void **address, size_t size, enum memory_kind kind)
{
    if (address == NULL || size == 0) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "allocation of %zu bytes", size);
    }
    size_t rounded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct block block = {NULL, rounded, kind, emulator_current_device(), true};
    if (!fits(&block)) {
        return out_of_memory(&block);
    }
    void *start = mmap(NULL, rounded, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host cannot map %zu bytes", rounded);
    }
    block.start = start;
    aclError error = keep(block);
    if (error != ACL_SUCCESS) {
        munmap(start, rounded);
        return error;
    }
    if (kind == MEMORY_DEVICE && rounded <= POISON_LIMIT) {
        memset(start, 0xFF, rounded);
    }
    emulator_count(kind == MEMORY_DEVICE ? COUNT_allocations : COUNT_host_allocations, 1);
    *address = start;
    return ACL_SUCCESS;
}

static aclError release(void *address, enum memory_kind kind)
{
    struct block block;
    if (!forget(address, kind, &block)) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "free of %p: not an allocation of the %s",
                               address, kind == MEMORY_DEVICE ? "device" : "host");
    }
    munmap(block.start, block.size);
    emulator_count(kind == MEMORY_DEVICE ? COUNT_frees : COUNT_host_frees, 1);
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void **address, size_t size, UNUSED aclrtMemMallocPolicy policy)
{
    return allocate(address, size, MEMORY_DEVICE);
}

aclError aclrtMallocAlign32(void **address, size_t size, UNUSED aclrtMemMallocPolicy policy)
{
    return allocate(address, size, MEMORY_DEVICE);
}

aclError aclrtFree(void *address) { return release(address, MEMORY_DEVICE); }

aclError aclrtMallocHost(void **address, size_t size)
{
    return allocate(address, size, MEMORY_HOST);
}

aclError aclrtMallocHostWithCfg(void **address, uint64_t size, UNUSED aclrtMallocConfig *config)
{
    return allocate(address, size, MEMORY_HOST);
}

aclError aclrtFreeHost(void *address) { return release(address, MEMORY_HOST); }

aclError aclrtGetMemInfo(UNUSED aclrtMemAttr attribute, size_t *available, size_t *total)
{
    uint64_t taken = emulator_used_memory(emulator_current_device());
    *total = emulator_device_memory();
    *available = taken < *total ? *total - taken : 0;
    return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes)
{
    memset(attributes, 0, sizeof *attributes);
    switch (emulator_memory_kind(address, NULL)) {
    case MEMORY_DEVICE: attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE; break;
    case MEMORY_HOST: attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST; break;
    default: attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED; break;
    }
    return ACL_SUCCESS;
}

/* Virtual memory of torch_npu's expandable segments: reserve a range, map physical pieces in. */
struct physical {
    size_t size;
};

aclError aclrtReserveMemAddress(void **address, size_t size, UNUSED size_t alignment,
                                UNUSED void *expected, UNUSED uint64_t flags)
{
    void *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host cannot reserve %zu bytes", size);
    }
    *address = start;
    return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(UNUSED void *address)
{
    return ACL_SUCCESS; /* an unmapped range costs nothing but addresses */
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size,
                             UNUSED const aclrtPhysicalMemProp *properties, UNUSED uint64_t flags)
{
    struct block wanted = {NULL, size, MEMORY_DEVICE, emulator_current_device(), false};
    struct physical *physical = NULL;
    if (!fits(&wanted)) {
        return out_of_memory(&wanted);
    }
    physical = malloc(sizeof *physical);
    if (physical == NULL) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host is out of memory");
    }
    physical->size = size;
    *handle = physical;
    emulator_count(COUNT_allocations, 1);
    return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle)
{
    free(handle);
    emulator_count(COUNT_frees, 1);
    return ACL_SUCCESS;
}

aclError aclrtMapMem(void *address, size_t size, UNUSED size_t offset,
                     UNUSED aclrtDrvMemHandle handle, UNUSED uint64_t flags)
{
    struct block block = {address, size, MEMORY_DEVICE, emulator_current_device(), false};
    if (mprotect(address, size, PROT_READ | PROT_WRITE) != 0) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "cannot map %zu bytes at %p", size, address);
    }
    return keep(block);
}

aclError aclrtUnmapMem(void *address)
{
    struct block block;
    if (!forget(address, MEMORY_DEVICE, &block)) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "unmap of %p: nothing is mapped", address);
    }
    if (mmap(block.start, block.size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "cannot unmap %p", address);
    }
    return ACL_SUCCESS;
}
