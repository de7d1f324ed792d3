// Errors inside the library are exceptions of one class; api.cpp turns them into a status and a message.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "moepool.h"

namespace moepool {

class Error : public std::exception {
  public:
    Error(moepool_status status, std::string message) : status_(status), message_(std::move(message)) {}
    moepool_status status() const { return status_; }
    const char *what() const noexcept override { return message_.c_str(); }

  private:
    moepool_status status_;
    std::string message_;
};

// Throws Error with a printf-style message that names the thing and the remedy.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(moepool_status status, const char *format, ...);

// The same, to be thrown later.
__attribute__((format(printf, 2, 3))) Error make_error(moepool_status status, const char *format, ...);

// The message of this thread's last failed call.
void set_last_error(const char *message) noexcept;
const char *last_error() noexcept;

}  // namespace moepool
