/* Shared by the stub libraries. A function that nobody wrote an answer for refuses. */
#ifndef CANN_STUB_H
#define CANN_STUB_H

enum { CANN_OK = 0, CANN_NO_DEVICE = 107001, CANN_NO_CONTEXT = 107002, CANN_REFUSED = 200006, CANN_NO_MEMORY = 207001 };

/* Say on stderr, with CANN_STUB_LOG, that `name` was called. */
void cann_stub_said(const char *name);
/* CANN_OK in mode `host`, a refusal otherwise. */
long cann_stub_if_host(void);

#define CANN_REFUSE(name) \
    long name(void) { cann_stub_said(#name); return CANN_REFUSED; }
#define CANN_DATA(name) void *name[64];
/* The two halves of an aclnn operator: how much memory it wants, and the launch. */
#define CANN_SIZE(name) \
    long name(void) { return cann_stub_if_host(); }
#define CANN_CALL(name) \
    long name(void) { cann_stub_said(#name); return cann_stub_if_host(); }

#endif
