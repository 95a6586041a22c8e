/* Capture, replay and update of graphs; CANN calls a captured graph a model RI. */
#include <stdio.h>
#include <stdlib.h>

#include "streams.h"

static uint32_t next_graph = 1;

int emulator_record(struct graph *graph, struct emulator_task task)
{
    if (graph->length == graph->capacity) {
        size_t capacity = graph->capacity ? 2 * graph->capacity : 64;
        struct emulator_task *grown = realloc(graph->tasks, capacity * sizeof *grown);
        if (grown == NULL) {
            return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host is out of memory");
        }
        graph->tasks = grown;
        graph->capacity = capacity;
    }
    graph->tasks[graph->length++] = task;
    emulator_count(COUNT_captured_tasks, 1);
    return ACL_SUCCESS;
}

int emulator_replace(struct stream *stream, struct emulator_task task)
{
    struct group *group = stream->update;
    size_t index = group->first + stream->updated;
    if (index >= group->end) {
        return emulator_refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED,
                               "task update: more tasks than the %zu of the group",
                               group->end - group->first);
    }
    struct emulator_task *old = &group->graph->tasks[index];
    old->release(old->argument);
    *old = task;
    stream->updated++;
    emulator_count(COUNT_updated_tasks, 1);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureBegin(aclrtStream handle, UNUSED aclmdlRICaptureMode mode)
{
    struct stream *stream = emulator_stream(handle);
    if (handle == NULL || stream->capture != NULL) {
        return emulator_refuse(ACL_ERROR_RT_STREAM_CAPTURED,
                               "the default stream, or a stream under capture, cannot be captured");
    }
    stream->capture = calloc(1, sizeof *stream->capture);
    if (stream->capture == NULL) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host is out of memory");
    }
    stream->owns_capture = true;
    stream->capture->id = next_graph++;
    emulator_count_captures(1);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *model)
{
    struct stream *stream = emulator_stream(handle);
    if (stream->capture == NULL || !stream->owns_capture) {
        return emulator_refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED,
                               "stream %d did not begin a capture", stream->id);
    }
    *model = stream->capture;
    emulator_leave_capture(stream->capture);
    emulator_count_captures(-1);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *model)
{
    const struct stream *stream = emulator_stream(handle);
    *status = stream->capture ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE
                              : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model != NULL) {
        *model = stream->capture;
    }
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(UNUSED aclmdlRICaptureMode *mode) { return ACL_SUCCESS; }

aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id)
{
    *id = ((const struct graph *)model)->id;
    return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, UNUSED aclrtStream stream)
{
    const struct graph *graph = model;
    emulator_count(COUNT_graph_replays, 1);
    for (size_t i = 0; i < graph->length; i++) {
        int code = graph->tasks[i].run(graph->tasks[i].argument);
        if (code != ACL_SUCCESS) {
            return code;
        }
        emulator_count(COUNT_replayed_tasks, 1);
    }
    return ACL_SUCCESS;
}

aclError aclmdlRIDestroy(aclmdlRI model)
{
    struct graph *graph = model;
    for (size_t i = 0; i < graph->length; i++) {
        graph->tasks[i].release(graph->tasks[i].argument);
    }
    free(graph->tasks);
    free(graph);
    return ACL_SUCCESS;
}

uint64_t emulator_graph_tasks(const void *graph) { return ((const struct graph *)graph)->length; }

aclError aclmdlRIDebugPrint(aclmdlRI model)
{
    const struct graph *graph = model;
    fprintf(stderr, "emulated graph %u: %zu tasks\n", graph->id, graph->length);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle)
{
    struct stream *stream = emulator_stream(handle);
    if (stream->capture == NULL) {
        return emulator_refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED,
                               "a task group needs a stream under capture");
    }
    stream->group_first = stream->capture->length;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *group)
{
    struct stream *stream = emulator_stream(handle);
    struct group *made = malloc(sizeof *made);
    if (stream->capture == NULL || made == NULL) {
        free(made);
        return emulator_refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED,
                               "a task group needs a stream under capture");
    }
    *made = (struct group){stream->capture, stream->group_first, stream->capture->length};
    *group = made; /* lives as long as the process: CANN has no call that ends it */
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group)
{
    struct stream *stream = emulator_stream(handle);
    if (group == NULL || stream->update != NULL || stream->capture != NULL) {
        return emulator_refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED,
                               "task update: no group, or the stream is in use");
    }
    stream->update = group;
    stream->updated = 0;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle)
{
    struct stream *stream = emulator_stream(handle);
    if (stream->update == NULL) {
        return emulator_refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "no task update has begun");
    }
    size_t wanted = stream->update->end - stream->update->first, done = stream->updated;
    stream->update = NULL;
    if (done != wanted) {
        return emulator_refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED,
                               "task update: %zu tasks for a group of %zu", done, wanted);
    }
    return ACL_SUCCESS;
}
