/* Dump mode: the registers and stack words of a call, read as the handles that they may be. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "opapi.h"

#if defined(__aarch64__)
enum { INTEGER_REGISTERS = 8 };
#else
enum { INTEGER_REGISTERS = 6 };
#endif
enum { FLOAT_REGISTERS = 8, STACK_WORDS = 48, TEXT_LIMIT = 32 };

struct writer {
    char *text;
    size_t room;
};

static void put(struct writer *to, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void put(struct writer *to, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(to->text, to->room, format, arguments);
    va_end(arguments);
    size_t step = length < 0 || (size_t)length >= to->room ? to->room - 1 : (size_t)length;
    to->text += step;
    to->room -= step;
}

/* Whether the word points to a short printable text; read so that a wild pointer does no harm. */
static bool read_text(uint64_t word, char text[TEXT_LIMIT])
{
    int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    ssize_t got = memory < 0 ? -1 : pread(memory, text, TEXT_LIMIT, (off_t)word);
    if (memory >= 0) {
        close(memory);
    }
    for (ssize_t i = 0; i < got; i++) {
        if (text[i] == '\0') {
            return i > 0;
        }
        if (text[i] < ' ' || text[i] > '~') {
            return false;
        }
    }
    return false;
}

static void put_tensor(struct writer *to, const aclTensor *tensor)
{
    put(to, "tensor(dtype %d, format %d, [", tensor->dtype, tensor->format);
    for (int i = 0; i < tensor->rank; i++) {
        put(to, "%s%lld", i ? ", " : "", (long long)tensor->dims[i]);
    }
    put(to, "])");
}

static void put_ints(struct writer *to, const struct array *array)
{
    put(to, "ints[");
    for (uint64_t i = 0; i < array->size && i < 16; i++) {
        put(to, "%s%lld", i ? ", " : "", (long long)((const int64_t *)array->values)[i]);
    }
    put(to, "]");
}

static void put_word(struct writer *to, uint64_t word)
{
    const void *pointer = (const void *)(uintptr_t)word;
    const struct array *array = pointer;
    char text[TEXT_LIMIT];
    switch (emulator_handle_kind(pointer)) {
    case HANDLE_TENSOR: put_tensor(to, pointer); return;
    case HANDLE_SCALAR: put(to, "scalar(dtype %d)", ((const aclScalar *)pointer)->dtype); return;
    case HANDLE_INT_ARRAY: put_ints(to, array); return;
    case HANDLE_FLOAT_ARRAY: put(to, "floats[%llu]", (unsigned long long)array->size); return;
    case HANDLE_BOOL_ARRAY: put(to, "bools[%llu]", (unsigned long long)array->size); return;
    case HANDLE_TENSOR_LIST:
        put(to, "tensors[");
        for (uint64_t i = 0; i < array->size; i++) {
            put(to, i ? ", " : "");
            put_word(to, ((const uint64_t *)array->values)[i]);
        }
        put(to, "]");
        return;
    case HANDLE_SCALAR_LIST: put(to, "scalars[%llu]", (unsigned long long)array->size); return;
    default: break;
    }
    if (word > UINT16_MAX && read_text(word, text)) {
        put(to, "\"%s\"", text);
    } else if (word >> 40 == 0 || word >> 40 == 0xFFFFFF) {
        put(to, "%lld", (long long)word);
    } else {
        put(to, "0x%llx", (unsigned long long)word);
    }
}

void emulator_describe(char *text, size_t room, const uint64_t *registers, const uint64_t *stack)
{
    struct writer to = {text, room};
    for (int i = 0; i < INTEGER_REGISTERS; i++) {
        put(&to, i ? ", " : "");
        put_word(&to, registers[i]);
    }
    put(&to, "; stack: ");
    for (int i = 0; i < STACK_WORDS && to.room > 256; i++) {
        put(&to, i ? ", " : "");
        put_word(&to, stack[i]);
    }
    put(&to, "; float registers: ");
    for (int i = 0; i < FLOAT_REGISTERS; i++) {
        double value;
        memcpy(&value, &registers[INTEGER_REGISTERS + i], sizeof value);
        put(&to, "%s%g", i ? ", " : "", value);
    }
}
