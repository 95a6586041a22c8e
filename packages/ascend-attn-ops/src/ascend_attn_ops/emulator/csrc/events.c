/* Events: a time and, while a stream is captured, the capture they belong to. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "streams.h"

struct event {
    struct timespec time;
    bool recorded;
    struct graph *capture;
    struct event *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct event *events;

void emulator_forget_captured_events(const struct graph *graph)
{
    pthread_mutex_lock(&lock);
    for (struct event *event = events; event != NULL; event = event->next) {
        if (event->capture == graph) {
            event->capture = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
}

static aclError create_event(aclrtEvent *handle)
{
    struct event *event = calloc(1, sizeof *event);
    if (event == NULL) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host is out of memory");
    }
    pthread_mutex_lock(&lock);
    event->next = events;
    events = event;
    pthread_mutex_unlock(&lock);
    *handle = event;
    return ACL_SUCCESS;
}

aclError aclrtCreateEvent(aclrtEvent *event) { return create_event(event); }

aclError aclrtCreateEventWithFlag(aclrtEvent *event, UNUSED uint32_t flag)
{
    return create_event(event);
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, UNUSED uint32_t flag)
{
    return create_event(event);
}

aclError aclrtDestroyEvent(aclrtEvent handle)
{
    struct event **link = &events;
    pthread_mutex_lock(&lock);
    while (*link != NULL && *link != handle) {
        link = &(*link)->next;
    }
    struct event *found = *link;
    if (found != NULL) {
        *link = found->next;
    }
    pthread_mutex_unlock(&lock);
    if (found == NULL) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "event %p does not exist", handle);
    }
    free(found);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream)
{
    struct event *event = handle;
    event->recorded = true;
    event->capture = emulator_stream(stream)->capture;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    emulator_count(COUNT_events_recorded, 1);
    return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent handle, UNUSED aclrtStream stream)
{
    ((struct event *)handle)->recorded = false;
    return ACL_SUCCESS;
}

/* A stream that waits for an event of a captured stream joins that capture, as on the device. */
aclError aclrtStreamWaitEvent(aclrtStream handle, aclrtEvent awaited)
{
    struct stream *stream = emulator_stream(handle);
    const struct event *event = awaited;
    emulator_count(COUNT_event_waits, 1);
    if (event->capture != NULL && stream->capture == NULL) {
        stream->capture = event->capture;
    }
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle)
{
    emulator_count(COUNT_event_synchronisations, 1);
    if (((const struct event *)handle)->capture != NULL) {
        return emulator_refuse(ACL_ERROR_RT_EVENT_CAPTURED,
                               "an event of a stream under capture cannot be synchronised");
    }
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(UNUSED aclrtEvent event, aclrtEventRecordedStatus *status)
{
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(UNUSED aclrtEvent event, aclrtEventWaitStatus *status)
{
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent first, aclrtEvent last)
{
    const struct event *start = first, *end = last;
    if (!start->recorded || !end->recorded) {
        return emulator_refuse(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "an event is not recorded");
    }
    double seconds = (double)(end->time.tv_sec - start->time.tv_sec);
    double rest = (double)(end->time.tv_nsec - start->time.tv_nsec);
    *milliseconds = (float)(seconds * 1e3 + rest / 1e6);
    return ACL_SUCCESS;
}

/* Names that torch_npu looks up and the public headers do not declare. */
int aclQueryEventRecordedStatus(aclrtEvent event, int *status);
int aclQueryEventWaitStatus(aclrtEvent event, int *status);

int aclQueryEventRecordedStatus(UNUSED aclrtEvent event, int *status)
{
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

int aclQueryEventWaitStatus(UNUSED aclrtEvent event, int *status)
{
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
