/* A fake engine for benchmarks/router_bench.py: an HTTP/1.1 server on one epoll loop, with no model.
 *
 *     engine PORT DELAY_MS GAP_MS EVENTS STAMPS
 *
 * A POST whose body says "stream":true is answered with a head, then EVENTS server-sent events, one
 * each GAP_MS, the last with `usage`; any other POST with one JSON answer after DELAY_MS. A request
 * with a gateway's turn line gets what a worker of OwnerServe puts on its answers, by STAMPS: "full"
 * (the hf engine's: the gateways' line, and lines for people), "line" (vLLM's: the line alone) or
 * "none". GET answers /health, /v1/models and /ownerserve/status as a worker does, the rest with 404.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct Conn {
    int fd, dead, refs;          /* refs: timers that still name it */
    char *in;
    size_t have, room;
    char *out;                   /* what the socket did not take yet */
    size_t out_have;
    int busy, is_stream, event, has_line;
    size_t body_bytes;
} Conn;

typedef struct Timer { double at; Conn *conn; struct Timer *next; } Timer;

static Timer *first, **last = &first;
static int ep, running, gap_ms, delay_ms, events, port;
static const char *stamps;
static long long incarnation;
static unsigned version;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* All timers have the same length within a run, so a queue is in order. */
static void after(Conn *c, int ms) {
    Timer *t = malloc(sizeof *t);
    t->at = now() + ms / 1e3; t->conn = c; t->next = NULL;
    *last = t; last = &t->next; c->refs++;
}

static void drop(Conn *c) {
    if (!c->dead) { close(c->fd); c->dead = 1; if (c->busy) running--; free(c->in); free(c->out); c->in = c->out = NULL; }
    if (!c->refs) free(c);
}

static void push(Conn *c, const char *data, size_t n) {
    if (c->dead) return;
    if (!c->out_have) {
        ssize_t w = send(c->fd, data, n, MSG_NOSIGNAL);
        if (w < 0) w = 0;
        data += w; n -= w;
        if (!n) return;
        struct epoll_event e = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
        epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
    }
    c->out = realloc(c->out, c->out_have + n);
    memcpy(c->out + c->out_have, data, n);
    c->out_have += n;
}

static int lines(Conn *c, char *to, size_t room) {
    if (!c->has_line || !strcmp(stamps, "none")) return 0;
    unsigned tokens = c->body_bytes / 4 / 16 * 16;
    version++;
    int n = snprintf(to, room,
        "x-ownerserve-answer: {\"unit\":[\"e%d\",0,%lld],\"load\":{\"as_of_s\":%.6f,"
        "\"pending_prefill_tokens\":0,\"running_sequences\":%d,\"waiting_sequences\":0,"
        "\"kv_bytes_free\":17179869184,\"kv_bytes_evictable\":34359738368,"
        "\"kv_bytes_total\":68719476736},\"owner\":[\"e%d\",0,%lld],\"epoch\":[[1,123456789],17],"
        "\"version\":%u,\"tip\":\"%064x\",\"tokens\":%u,\"mode\":\"direct_append\"}\r\n",
        port, incarnation, now(), running, port, incarnation, version, version, tokens);
    if (!strcmp(stamps, "full"))
        n += snprintf(to + n, room - n,
            "x-ownerserve-mode: direct_append\r\nx-ownerserve-cached-tokens: %u\r\n"
            "x-ownerserve-prompt-tokens: %u\r\nx-ownerserve-epoch: 1.123456789.17\r\n"
            "x-ownerserve-version: %u\r\n", tokens, tokens + 8, version);
    return n;
}

static int usage(Conn *c, char *to, size_t room) {
    unsigned tokens = c->body_bytes / 4;
    return snprintf(to, room,
        "\"usage\":{\"prompt_tokens\":%u,\"total_tokens\":%u,\"completion_tokens\":64,"
        "\"prompt_tokens_details\":{\"cached_tokens\":%u}}", tokens + 8, tokens + 72, tokens / 16 * 16);
}

#define ID "chatcmpl-0f6a2b1c9d8e4f7a"

static void answer_whole(Conn *c) {
    char body[1024], head[2048];
    int n = snprintf(body, sizeof body, "{\"id\":\"" ID "\",\"object\":\"chat.completion\","
        "\"created\":1763800000,\"model\":\"fake\",\"choices\":[{\"index\":0,\"message\":{\"role\":"
        "\"assistant\",\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],",
        "the quick brown fox jumps over the lazy dog and goes home again");
    n += usage(c, body + n, sizeof body - n);
    body[n++] = '}';
    int h = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\ndate: Sun, 23 Nov 2026 04:00:00 GMT\r\n"
        "server: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n", n);
    h += lines(c, head + h, sizeof head - h);
    memcpy(head + h, "\r\n", 2); h += 2;
    memcpy(head + h, body, n);
    push(c, head, h + n);
    c->busy = 0; running--;
}

static void answer_head(Conn *c) {
    char head[2048];
    int h = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\ndate: Sun, 23 Nov 2026 04:00:00 GMT\r\n"
        "server: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        "transfer-encoding: chunked\r\n");
    h += lines(c, head + h, sizeof head - h);
    memcpy(head + h, "\r\n", 2);
    push(c, head, h + 2);
    c->event = 0;
    after(c, gap_ms);
}

static int chunked(char *to, const char *data, int n) {
    int h = sprintf(to, "%x\r\n", n);
    memcpy(to + h, data, n);
    memcpy(to + h + n, "\r\n", 2);
    return h + n + 2;
}

static void answer_event(Conn *c) {
    char event[1024], out[2048];
    int n, at;
    c->event++;
    n = snprintf(event, sizeof event, "data: {\"id\":\"" ID "\",\"object\":\"chat.completion.chunk\","
        "\"created\":1763800000,\"model\":\"fake\",\"choices\":[{\"index\":0,\"delta\":{\"content\":"
        "\" word%d\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n", c->event);
    if (c->event < events) {
        push(c, out, chunked(out, event, n));
        after(c, gap_ms);
        return;
    }
    n = snprintf(event, sizeof event, "data: {\"id\":\"" ID "\",\"object\":\"chat.completion.chunk\","
        "\"created\":1763800000,\"model\":\"fake\",\"choices\":[],");
    n += usage(c, event + n, sizeof event - n);
    n += snprintf(event + n, sizeof event - n, "}\n\n");
    at = chunked(out, event, n);
    at += chunked(out + at, "data: [DONE]\n\n", 14);
    memcpy(out + at, "0\r\n\r\n", 5);
    push(c, out, at + 5);
    c->busy = 0; running--;
}

static void answer_get(Conn *c, const char *target) {
    char body[1024] = "{}", head[2048];
    int status = 200;
    if (!strncmp(target, "/health ", 8)) strcpy(body, "");
    else if (!strncmp(target, "/v1/models ", 11))
        strcpy(body, "{\"object\":\"list\",\"data\":[{\"id\":\"fake\",\"object\":\"model\"}]}");
    else if (!strncmp(target, "/ownerserve/status ", 19) && strcmp(stamps, "none"))
        snprintf(body, sizeof body, "{\"version\":1,\"unit\":{\"worker\":\"e%d\",\"rank\":0,"
            "\"incarnation\":%lld},\"load\":{\"as_of_s\":%.6f,\"pending_prefill_tokens\":0,"
            "\"running_sequences\":%d,\"waiting_sequences\":0,\"kv_bytes_free\":17179869184,"
            "\"kv_bytes_evictable\":34359738368,\"kv_bytes_total\":68719476736},\"profile\":{"
            "\"models\":[\"fake\"],\"role\":\"hybrid\",\"kv_bytes_per_token\":4096,"
            "\"sequence_tokens\":1048576,\"owns_sessions\":true}}", port, incarnation, now(), running);
    else status = 404;
    int n = snprintf(head, sizeof head, "HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n"
        "content-length: %zu\r\n\r\n%s", status, status == 200 ? "OK" : "Not Found", strlen(body), body);
    push(c, head, n);
}

/* Where a body of chunks ends, or 0; counts its payload. */
static size_t chunks_end(const char *at, size_t have, size_t *payload) {
    size_t pos = 0;
    *payload = 0;
    for (;;) {
        const char *nl = memmem(at + pos, have - pos, "\r\n", 2);
        if (!nl) return 0;
        size_t size = strtoul(at + pos, NULL, 16), next = nl - at + 2 + size + 2;
        if (next > have) return 0;
        if (!size) return next;
        *payload += size;
        pos = next;
    }
}

static const char *find(const char *head, const char *name) { return strcasestr(head, name); }

static void take(Conn *c) {
    while (!c->busy && c->have) {
        char *end = memmem(c->in, c->have, "\r\n\r\n", 4);
        if (!end) return;
        size_t head = end - c->in + 4, whole, payload = 0;
        end[2] = 0;
        const char *length = find(c->in, "\r\ncontent-length:");
        const char *frames = find(c->in, "\r\ntransfer-encoding:");
        int has_line = find(c->in, "\r\nx-ownerserve-session:") != NULL;
        int waits = find(c->in, "\r\nexpect: 100-continue") != NULL;
        end[2] = '\r';
        if (length) { payload = strtoul(length + 17, NULL, 10); whole = head + payload; }
        else if (frames) { whole = chunks_end(c->in + head, c->have - head, &payload); if (!whole) return; whole += head; }
        else whole = head;
        if (waits && c->have == head) push(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
        if (c->have < whole) {
            if (c->room < whole + 4096) { c->room = whole + 4096; c->in = realloc(c->in, c->room); }
            return;
        }
        if (!strncmp(c->in, "GET ", 4)) answer_get(c, c->in + 4);
        else {
            const char *body = c->in + head;
            c->is_stream = memmem(body, whole - head, "\"stream\":true", 13) != NULL
                || memmem(body, whole - head, "\"stream\": true", 14) != NULL;
            c->body_bytes = payload; c->has_line = has_line; c->busy = 1; running++;
            if (c->is_stream) answer_head(c);
            else if (delay_ms) after(c, delay_ms);
            else answer_whole(c);
        }
        memmove(c->in, c->in + whole, c->have - whole);
        c->have -= whole;
    }
}

static int on_input(Conn *c) {
    for (;;) {
        if (c->room - c->have < 65536) { c->room = c->have + 262144; c->in = realloc(c->in, c->room); }
        size_t asked = c->room - c->have;
        ssize_t n = recv(c->fd, c->in + c->have, asked, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN)) return 0;
        if (n < 0) return 1;
        c->have += n;
        take(c);
        if ((size_t)n < asked) return 1;
    }
}

int main(int argc, char **argv) {
    (void)argc;
    port = atoi(argv[1]); delay_ms = atoi(argv[2]); gap_ms = atoi(argv[3]); events = atoi(argv[4]);
    stamps = argv[5];
    signal(SIGPIPE, SIG_IGN);
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    incarnation = t.tv_sec * 1000000000LL + t.tv_nsec;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 4096)) { perror("engine"); return 1; }
    ep = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL}, got[256];
    epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
    for (;;) {
        struct timespec wait, *waits = NULL;
        if (first) {
            double left = first->at - now();
            if (left < 0) left = 0;
            wait.tv_sec = left; wait.tv_nsec = (left - wait.tv_sec) * 1e9;
            waits = &wait;
        }
        int n = epoll_pwait2(ep, got, 256, waits, NULL);
        for (int i = 0; i < n; i++) {
            Conn *c = got[i].data.ptr;
            if (!c) {
                int fd;
                while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    Conn *made = calloc(1, sizeof *made);
                    made->fd = fd;
                    struct epoll_event in = {.events = EPOLLIN, .data.ptr = made};
                    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &in);
                }
                continue;
            }
            if (got[i].events & EPOLLOUT) {
                ssize_t w = send(c->fd, c->out, c->out_have, MSG_NOSIGNAL);
                if (w > 0) { memmove(c->out, c->out + w, c->out_have - w); c->out_have -= w; }
                if (!c->out_have) {
                    struct epoll_event in = {.events = EPOLLIN, .data.ptr = c};
                    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &in);
                }
            }
            if ((got[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) && !on_input(c)) drop(c);
        }
        double at_s = now();
        while (first && first->at <= at_s) {
            Timer *due = first;
            first = due->next;
            if (!first) last = &first;
            Conn *c = due->conn;
            free(due);
            c->refs--;
            if (c->dead) { if (!c->refs) free(c); continue; }
            if (c->is_stream) answer_event(c); else answer_whole(c);
            if (!c->busy) take(c);
        }
    }
}
