/* Streams: an order of tasks, run at once or recorded into a graph. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "streams.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream default_stream;
static struct stream *streams = &default_stream;
static int32_t next_stream = 1;
static int captures;

struct stream *emulator_stream(const void *handle)
{
    return handle == NULL ? &default_stream : (struct stream *)handle;
}

bool emulator_is_capturing(const void *stream) { return emulator_stream(stream)->capture != NULL; }
bool emulator_any_capture(void) { return captures > 0; }
void emulator_count_captures(int change) { captures += change; }

int emulator_submit(void *handle, struct emulator_task task)
{
    struct stream *stream = emulator_stream(handle);
    int code;
    if (stream->update != NULL) {
        code = emulator_replace(stream, task);
    } else if (stream->capture != NULL) {
        code = emulator_record(stream->capture, task);
    } else {
        code = task.run(task.argument);
        task.release(task.argument);
        return code;
    }
    if (code != ACL_SUCCESS) {
        task.release(task.argument);
    }
    return code;
}

static aclError create_stream(aclrtStream *handle)
{
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host is out of memory");
    }
    pthread_mutex_lock(&lock);
    stream->id = next_stream++;
    stream->next = streams->next;
    streams->next = stream;
    pthread_mutex_unlock(&lock);
    *handle = stream;
    return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream *stream) { return create_stream(stream); }

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, UNUSED uint32_t priority,
                                     UNUSED uint32_t flag)
{
    return create_stream(stream);
}

aclError aclrtDestroyStream(aclrtStream handle)
{
    struct stream *previous = streams;
    pthread_mutex_lock(&lock);
    while (previous->next != NULL && previous->next != handle) {
        previous = previous->next;
    }
    struct stream *found = previous->next;
    if (found != NULL) {
        previous->next = found->next;
    }
    pthread_mutex_unlock(&lock);
    if (found == NULL) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "stream %p does not exist", handle);
    }
    free(found);
    return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

static aclError synchronise_stream(aclrtStream stream)
{
    emulator_count(COUNT_stream_synchronisations, 1);
    if (emulator_is_capturing(stream)) {
        return emulator_refuse(ACL_ERROR_RT_STREAM_CAPTURED,
                               "stream %d is being captured and cannot be synchronised",
                               emulator_stream(stream)->id);
    }
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronise_stream(stream); }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, UNUSED int32_t timeout)
{
    return synchronise_stream(stream);
}

static aclError synchronise_device(void)
{
    emulator_count(COUNT_device_synchronisations, 1);
    if (emulator_any_capture()) {
        return emulator_refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                               "a stream is being captured: the device cannot be synchronised");
    }
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeDevice(void) { return synchronise_device(); }

aclError aclrtSynchronizeDeviceWithTimeout(UNUSED int32_t timeout) { return synchronise_device(); }

aclError aclrtStreamQuery(UNUSED aclrtStream stream, aclrtStreamStatus *status)
{
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t *id)
{
    *id = emulator_stream(stream)->id;
    return ACL_SUCCESS;
}

aclError aclrtSetStreamFailureMode(UNUSED aclrtStream stream, UNUSED uint64_t mode)
{
    return ACL_SUCCESS;
}

aclError aclrtSetStreamOverflowSwitch(UNUSED aclrtStream stream, UNUSED uint32_t flag)
{
    return ACL_SUCCESS;
}

aclError aclrtGetStreamOverflowSwitch(UNUSED aclrtStream stream, uint32_t *flag)
{
    *flag = 0;
    return ACL_SUCCESS;
}

aclError aclrtSetStreamAttribute(UNUSED aclrtStream stream, UNUSED aclrtStreamAttr attribute,
                                 UNUSED aclrtStreamAttrValue *value)
{
    return ACL_SUCCESS;
}

void emulator_leave_capture(const struct graph *graph)
{
    pthread_mutex_lock(&lock);
    for (struct stream *stream = streams; stream != NULL; stream = stream->next) {
        if (stream->capture == graph) {
            stream->capture = NULL;
            stream->owns_capture = false;
        }
    }
    pthread_mutex_unlock(&lock);
    emulator_forget_captured_events(graph);
}
