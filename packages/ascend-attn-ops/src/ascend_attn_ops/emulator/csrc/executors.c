/* Executors, the second stage of every aclnn operator, and the way from an operator's first stage
 * into Python. */
#include <stdlib.h>

#include "opapi.h"

struct aclOpExecutor {
    uint64_t call; /* Python's number of the prepared call */
    uint64_t workspace;
    int op;
    bool repeatable;
};

/* Set by Python. `run` computes a prepared call, `forget` drops it, `resolve` fills the operator's
 * slot if it can (arguments: index, text of the arguments or NULL). */
struct emulator_callbacks {
    int (*run)(uint64_t call);
    void (*forget)(uint64_t call);
    void (*resolve)(int op, const char *arguments);
};

static struct emulator_callbacks callbacks;
static bool dump;

void emulator_set_callbacks(struct emulator_callbacks given);
void emulator_set_dump(int enabled);
aclOpExecutor *emulator_create_executor(int op, uint64_t call, uint64_t workspace);
void *emulator_resolve(int op, const uint64_t *registers, const uint64_t *stack);
int emulator_second_stage(void *workspace, uint64_t size, aclOpExecutor *executor, void *stream);
int emulator_submit_call(uint64_t call, void *stream);
int aclDestroyAclOpExecutor(aclOpExecutor *executor);
int aclSetAclOpExecutorRepeatable(aclOpExecutor *executor);
int aclnnInit(const char *path);
int aclnnFinalize(void);

void emulator_set_callbacks(struct emulator_callbacks given) { callbacks = given; }
void emulator_set_dump(int enabled) { dump = enabled != 0; }

aclOpExecutor *emulator_create_executor(int op, uint64_t call, uint64_t workspace)
{
    aclOpExecutor *executor = malloc(sizeof *executor);
    if (executor == NULL) {
        return NULL;
    }
    *executor = (aclOpExecutor){call, workspace, op, false};
    if (!emulator_add_handle(executor, HANDLE_EXECUTOR)) {
        free(executor);
        return NULL;
    }
    return executor;
}

/* Ended executors are kept a while, so that the next one gets another address and a stale pointer
 * is recognised. */
static void retire(aclOpExecutor *executor)
{
    enum { KEPT = 64 };
    static aclOpExecutor *retired[KEPT];
    static unsigned next;
    callbacks.forget(executor->call);
    unsigned place = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED) % KEPT;
    free(__atomic_exchange_n(&retired[place], executor, __ATOMIC_ACQ_REL));
}

static int run(void *argument) { return callbacks.run(((const aclOpExecutor *)argument)->call); }
static void release(void *argument) { retire(argument); }
static void leave(UNUSED void *argument) {} /* a repeatable executor stays its caller's */

int emulator_second_stage(void *workspace, uint64_t size, aclOpExecutor *executor, void *stream)
{
    if (executor == NULL) {
        return emulator_refuse(ACLNN_NULL_POINTER, "second stage: the executor is null");
    }
    if (emulator_handle_kind(executor) != HANDLE_EXECUTOR) {
        return emulator_refuse(ACLNN_INVALID,
                               "second stage: no such executor; one that is not repeatable serves "
                               "one call");
    }
    const char *name = emulator_operator_names[executor->op];
    if (executor->workspace != 0 && workspace == NULL) {
        return emulator_refuse(ACLNN_NULL_POINTER, "%s: the workspace is null, needed: %llu bytes",
                               name, (unsigned long long)executor->workspace);
    }
    size_t left = 0;
    if (executor->workspace != 0 && emulator_memory_kind(workspace, &left) != MEMORY_DEVICE) {
        return emulator_refuse(ACLNN_INVALID, "%s: the workspace is not device memory", name);
    }
    if (size < executor->workspace || (executor->workspace != 0 && left < executor->workspace)) {
        return emulator_refuse(ACLNN_INVALID, "%s: workspace of %llu bytes, needed: %llu", name,
                               (unsigned long long)(left < size ? left : size),
                               (unsigned long long)executor->workspace);
    }
    emulator_count(COUNT_launches, 1);
    if (!executor->repeatable) {
        emulator_remove_handle(executor, HANDLE_EXECUTOR);
    }
    struct emulator_task task = {run, executor->repeatable ? leave : release, executor};
    return emulator_submit(stream, task);
}

/* For operators that Python serves without a first stage: puts a prepared call on a stream. */
int emulator_submit_call(uint64_t call, void *stream)
{
    aclOpExecutor *executor = malloc(sizeof *executor);
    if (executor == NULL) {
        return emulator_refuse(ACLNN_INNER, "the host is out of memory");
    }
    *executor = (aclOpExecutor){call, 0, 0, false};
    emulator_count(COUNT_launches, 1);
    return emulator_submit(stream, (struct emulator_task){run, release, executor});
}

int aclDestroyAclOpExecutor(aclOpExecutor *executor)
{
    if (!emulator_remove_handle(executor, HANDLE_EXECUTOR)) {
        return emulator_refuse(ACLNN_INVALID, "destroy of executor %p: it does not exist",
                               (void *)executor);
    }
    retire(executor);
    return ACL_SUCCESS;
}

int aclSetAclOpExecutorRepeatable(aclOpExecutor *executor)
{
    if (emulator_handle_kind(executor) != HANDLE_EXECUTOR) {
        return emulator_refuse(ACLNN_INVALID, "executor %p does not exist", (void *)executor);
    }
    executor->repeatable = true;
    return ACL_SUCCESS;
}

int aclnnInit(UNUSED const char *path) { return ACL_SUCCESS; }
int aclnnFinalize(void) { return ACL_SUCCESS; }

/* The first stage of an operator whose slot is empty; it was called with unknown arguments. */
static int refuse_call(void) { return ACLNN_NOT_EMULATED; }

/* Called by the trampoline of an empty slot; returns where the call is to continue. */
void *emulator_resolve(int op, const uint64_t *registers, const uint64_t *stack)
{
    char arguments[4096];
    if (dump) {
        emulator_describe(arguments, sizeof arguments, registers, stack);
    }
    if (callbacks.resolve != NULL) {
        callbacks.resolve(op, dump ? arguments : NULL);
    }
    if (emulator_slots[op] != NULL) {
        return emulator_slots[op];
    }
    emulator_refuse(ACLNN_NOT_EMULATED,
                    "%s is not emulated%s", emulator_operator_names[op],
                    dump ? "" : "; `--dump` shows its arguments, "
                                "ascend_attn_ops.emulator.kernel adds it (docs/emulator.md)");
    return (void *)refuse_call;
}
