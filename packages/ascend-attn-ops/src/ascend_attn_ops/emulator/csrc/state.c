/* Counters and error text. */
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "acl/acl.h"
#include "emulator.h"

static atomic_uint_fast64_t counters[COUNTER_TOTAL];

static const char *const counter_names[COUNTER_TOTAL] = {
#define X(name) #name,
    EMULATOR_COUNTERS(X)
#undef X
};

void emulator_count(enum emulator_counter counter, uint64_t amount)
{
    atomic_fetch_add(&counters[counter], amount);
}

uint64_t emulator_counter_value(int counter)
{
    return counter < 0 || counter >= COUNTER_TOTAL ? 0 : atomic_load(&counters[counter]);
}

const char *emulator_counter_name(int counter)
{
    return counter < 0 || counter >= COUNTER_TOTAL ? NULL : counter_names[counter];
}

/* As in CANN, the text belongs to the thread and reading it clears it. */
static __thread char pending[4096];
static __thread char handed_out[4096];

static void set_error(const char *format, va_list arguments)
{
    vsnprintf(pending, sizeof pending, format, arguments);
}

void emulator_set_error(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    set_error(format, arguments);
    va_end(arguments);
}

int emulator_refuse(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    set_error(format, arguments);
    va_end(arguments);
    emulator_count(COUNT_refused_calls, 1);
    return code;
}

/* For Python: a text without format. */
void emulator_report(const char *text)
{
    emulator_set_error("%s", text);
    emulator_count(COUNT_refused_calls, 1);
}

const char *aclGetRecentErrMsg(void)
{
    if (pending[0] == '\0') {
        return NULL;
    }
    snprintf(handed_out, sizeof handed_out, "%s", pending);
    pending[0] = '\0';
    return handed_out;
}
