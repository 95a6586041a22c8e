/* Streams, graphs and events as streams.c, graphs.c and events.c see them. */
#ifndef ASCEND_EMULATOR_STREAMS_H
#define ASCEND_EMULATOR_STREAMS_H

#include "acl/acl.h"
#include "emulator.h"

struct graph {
    struct emulator_task *tasks;
    size_t length, capacity;
    uint32_t id;
};

/* Tasks of a graph that may be replaced later (graph_task_group_begin ... end of torch_npu). */
struct group {
    struct graph *graph;
    size_t first, end;
};

struct stream {
    int32_t id;
    struct graph *capture;
    bool owns_capture; /* false for a stream that joined by waiting for a captured event */
    size_t group_first;
    struct group *update;
    size_t updated;
    struct stream *next;
};

struct stream *emulator_stream(const void *handle);
int emulator_record(struct graph *graph, struct emulator_task task);
int emulator_replace(struct stream *stream, struct emulator_task task);
void emulator_leave_capture(const struct graph *graph);
void emulator_forget_captured_events(const struct graph *graph);
void emulator_count_captures(int change);

#endif
