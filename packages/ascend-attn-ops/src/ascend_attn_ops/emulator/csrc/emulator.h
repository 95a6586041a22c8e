/* What the parts of the emulated CANN runtime share. libascendcl.so exports it to libopapi.so and,
 * through ctypes, to Python. Everything runs at the moment it is submitted: streams have an order
 * but no concurrency of their own, except that a stream under capture records instead. */
#ifndef ASCEND_EMULATOR_H
#define ASCEND_EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define UNUSED __attribute__((unused))
#define MAX_DEVICES 16

/* Monotonic counters; emulator_counter_name() gives the names in this order. */
#define EMULATOR_COUNTERS(X)                                                                       \
    X(host_to_device_copies) X(host_to_device_bytes) X(device_to_host_copies)                      \
    X(device_to_host_bytes) X(device_to_device_copies) X(host_to_host_copies) X(memsets)           \
    X(stream_synchronisations) X(device_synchronisations) X(event_synchronisations)                \
    X(allocations) X(frees) X(host_allocations) X(host_frees) X(launches) X(captured_tasks)        \
    X(graph_replays) X(replayed_tasks) X(updated_tasks) X(events_recorded) X(event_waits)          \
    X(refused_calls)

enum emulator_counter {
#define X(name) COUNT_##name,
    EMULATOR_COUNTERS(X)
#undef X
    COUNTER_TOTAL
};

enum memory_kind { MEMORY_UNKNOWN = -1, MEMORY_DEVICE = 0, MEMORY_HOST = 1 };

typedef int (*emulator_run)(void *argument);
typedef void (*emulator_release)(void *argument);

/* A task of a stream: `run` may be called several times (graph replay), `release` once. */
struct emulator_task {
    emulator_run run;
    emulator_release release;
    void *argument;
};

void emulator_count(enum emulator_counter counter, uint64_t amount);
void emulator_set_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
int emulator_refuse(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Runs the task and releases it, or records it when `stream` is under capture or update. */
int emulator_submit(void *stream, struct emulator_task task);
bool emulator_is_capturing(const void *stream);
bool emulator_any_capture(void);

/* Kind of memory at `address`; `left` becomes the number of bytes up to the allocation's end. */
enum memory_kind emulator_memory_kind(const void *address, size_t *left);
int emulator_current_device(void);
uint64_t emulator_device_memory(void);
uint64_t emulator_used_memory(int device);

/* Called from Python. */
void emulator_report(const char *text);
int emulator_configure(uint32_t devices, uint64_t memory_bytes, const char *cann_version);
uint64_t emulator_counter_value(int counter);
const char *emulator_counter_name(int counter);
uint64_t emulator_live_allocations(int kind);
uint64_t emulator_graph_tasks(const void *graph);

#endif
