/* As much of libnccl.so.2 as suspends communicators, with NCCL 2.29.7's rules: null and what is suspended already are
   refused, as is the resume of what is not; each call waits for all ranks of the communicator. */
#include <stdint.h>
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { SUSPEND_MEM = 1, STAT_SUSPEND = 0 };

struct communicator {
  int suspended;
  uint64_t bytes;
};

typedef int meeting(struct communicator *, const char *);

static int version;
static meeting *meet;
static const char *last = "";

static int refuse(int code, const char *why) {
  last = why;
  return code;
}

void strict_begin(int its_version, meeting *its_meeting) {
  version = its_version;
  meet = its_meeting;
}

struct communicator *strict_make(uint64_t bytes) {
  struct communicator *made = calloc(1, sizeof *made);
  made->bytes = bytes;
  return made;
}

int strict_is_suspended(struct communicator *communicator) { return communicator->suspended; }

int ncclGetVersion(int *found) {
  *found = version;
  return SUCCESS;
}

const char *ncclGetLastError(struct communicator *unused) { return last; }

int ncclCommSuspend(struct communicator *communicator, int flags) {
  if (!communicator) return refuse(INVALID_ARGUMENT, "comm is null");
  if (flags != SUSPEND_MEM) return refuse(INVALID_USAGE, "no memory was asked for");
  if (communicator->suspended) return refuse(INVALID_USAGE, "MemManager: Already suspended");
  if (!meet(communicator, "ncclCommSuspend")) return refuse(REMOTE_ERROR, "ranks did not come");
  communicator->suspended = 1;
  return SUCCESS;
}

int ncclCommResume(struct communicator *communicator) {
  if (!communicator) return refuse(INVALID_ARGUMENT, "comm is null");
  if (!communicator->suspended) return refuse(INVALID_USAGE, "MemManager: Not in suspended state");
  if (!meet(communicator, "ncclCommResume")) return refuse(REMOTE_ERROR, "ranks did not come");
  communicator->suspended = 0;
  return SUCCESS;
}

int ncclCommMemStats(struct communicator *communicator, int statistic, uint64_t *value) {
  if (!communicator || statistic != STAT_SUSPEND) return refuse(INVALID_ARGUMENT, "no such statistic");
  *value = communicator->bytes;
  return SUCCESS;
}
