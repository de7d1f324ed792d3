#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace moepool {

namespace {
// Plain storage: it can be written when memory has run out, and needs no destructor at thread exit.
thread_local char message_of_thread[512] = "";
}  // namespace

namespace {
Error format_error(moepool_status status, const char *format, va_list arguments) {
    char text[sizeof message_of_thread];
    std::vsnprintf(text, sizeof text, format, arguments);
    return Error(status, text);
}
}  // namespace

void fail(moepool_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const Error error = format_error(status, format, arguments);
    va_end(arguments);
    throw error;
}

Error make_error(moepool_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    Error error = format_error(status, format, arguments);
    va_end(arguments);
    return error;
}

void set_last_error(const char *message) noexcept {
    std::snprintf(message_of_thread, sizeof message_of_thread, "%s", message);
}

const char *last_error() noexcept { return message_of_thread; }

}  // namespace moepool
