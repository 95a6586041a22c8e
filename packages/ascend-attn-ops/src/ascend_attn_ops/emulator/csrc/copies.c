/* Copies, fills and host callbacks. Asynchronous ones go through the stream, so that a capture
 * records them. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "acl/acl.h"
#include "emulator.h"

struct transfer {
    void *target;
    const void *source;
    size_t size;
    int value;
};

/* What CANN infers for ACL_MEMCPY_DEFAULT: memory that it has not allocated belongs to the host. */
static aclrtMemcpyKind inferred(const void *target, const void *source)
{
    bool to_device = emulator_memory_kind(target, NULL) == MEMORY_DEVICE;
    bool from_device = emulator_memory_kind(source, NULL) == MEMORY_DEVICE;
    if (to_device) {
        return from_device ? ACL_MEMCPY_DEVICE_TO_DEVICE : ACL_MEMCPY_HOST_TO_DEVICE;
    }
    return from_device ? ACL_MEMCPY_DEVICE_TO_HOST : ACL_MEMCPY_HOST_TO_HOST;
}

static void count_copy(void *target, const void *source, size_t size, aclrtMemcpyKind kind)
{
    switch (kind == ACL_MEMCPY_DEFAULT ? inferred(target, source) : kind) {
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE:
        emulator_count(COUNT_host_to_device_copies, 1);
        emulator_count(COUNT_host_to_device_bytes, size);
        break;
    case ACL_MEMCPY_DEVICE_TO_HOST:
        emulator_count(COUNT_device_to_host_copies, 1);
        emulator_count(COUNT_device_to_host_bytes, size);
        break;
    case ACL_MEMCPY_HOST_TO_HOST: emulator_count(COUNT_host_to_host_copies, 1); break;
    default: emulator_count(COUNT_device_to_device_copies, 1); break;
    }
}

static aclError check_range(const char *what, const void *address, size_t size)
{
    size_t left = size;
    if (emulator_memory_kind(address, &left) != MEMORY_UNKNOWN && left < size) {
        return emulator_refuse(ACL_ERROR_RT_PARAM_INVALID,
                               "%s of %zu bytes at %p passes the end of its allocation by %zu",
                               what, size, address, size - left);
    }
    return ACL_SUCCESS;
}

static aclError check_copy(void *target, size_t room, const void *source, size_t size)
{
    if (size > room) {
        return emulator_refuse(ACL_ERROR_RT_PARAM_INVALID,
                               "copy of %zu bytes into a target of %zu", size, room);
    }
    aclError error = check_range("write", target, size);
    return error == ACL_SUCCESS ? check_range("read", source, size) : error;
}

static int run_copy(void *argument)
{
    const struct transfer *copy = argument;
    memmove(copy->target, copy->source, copy->size);
    return ACL_SUCCESS;
}

static int run_fill(void *argument)
{
    const struct transfer *fill = argument;
    memset(fill->target, fill->value, fill->size);
    return ACL_SUCCESS;
}

static aclError submit(aclrtStream stream, emulator_run run, struct transfer transfer)
{
    if (!emulator_is_capturing(stream)) {
        return run(&transfer);
    }
    struct transfer *kept = malloc(sizeof *kept);
    if (kept == NULL) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host is out of memory");
    }
    *kept = transfer;
    return emulator_submit(stream, (struct emulator_task){run, free, kept});
}

aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t size,
                     aclrtMemcpyKind kind)
{
    if (emulator_any_capture()) {
        return emulator_refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                               "a stream is being captured: no synchronous copy is allowed");
    }
    aclError error = check_copy(target, room, source, size);
    if (error == ACL_SUCCESS) {
        count_copy(target, source, size, kind);
        memmove(target, source, size);
    }
    return error;
}

aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t size,
                          aclrtMemcpyKind kind, aclrtStream stream)
{
    aclError error = check_copy(target, room, source, size);
    if (error != ACL_SUCCESS) {
        return error;
    }
    count_copy(target, source, size, kind);
    return submit(stream, run_copy, (struct transfer){target, source, size, 0});
}

aclError aclrtMemset(void *target, size_t room, int32_t value, size_t size)
{
    aclError error = check_copy(target, room, target, size);
    if (error == ACL_SUCCESS) {
        emulator_count(COUNT_memsets, 1);
        memset(target, value, size);
    }
    return error;
}

aclError aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t size,
                          aclrtStream stream)
{
    aclError error = check_copy(target, room, target, size);
    if (error != ACL_SUCCESS) {
        return error;
    }
    emulator_count(COUNT_memsets, 1);
    return submit(stream, run_fill, (struct transfer){target, NULL, size, value});
}

struct host_call {
    void (*function)(void *);
    void *argument;
};

static int run_host_call(void *argument)
{
    const struct host_call *call = argument;
    call->function(call->argument);
    return ACL_SUCCESS;
}

static aclError submit_host_call(aclrtStream stream, void (*function)(void *), void *argument)
{
    struct host_call *call = malloc(sizeof *call);
    if (call == NULL) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host is out of memory");
    }
    *call = (struct host_call){function, argument};
    return emulator_submit(stream, (struct emulator_task){run_host_call, free, call});
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *argument)
{
    return submit_host_call(stream, function, argument);
}

aclError aclrtLaunchCallback(aclrtCallback function, void *argument,
                             UNUSED aclrtCallbackBlockType block, aclrtStream stream)
{
    return submit_host_call(stream, function, argument);
}

aclError aclrtSubscribeReport(UNUSED uint64_t thread, UNUSED aclrtStream stream)
{
    return ACL_SUCCESS;
}

aclError aclrtUnSubscribeReport(UNUSED uint64_t thread, UNUSED aclrtStream stream)
{
    return ACL_SUCCESS;
}

/* torch_npu's callback thread asks in a loop; callbacks have already run when it asks. */
aclError aclrtProcessReport(int32_t timeout)
{
    usleep(timeout > 0 && timeout < 10 ? (useconds_t)timeout * 1000 : 10000);
    return ACL_ERROR_RT_REPORT_TIMEOUT;
}
