/* The load of benchmarks/router_bench.py: HTTP/1.1 clients on one epoll loop.
 *
 *     load PORT RATE CONNECTIONS WARM_S SECONDS BODY_BYTES EVENTS SESSIONS KEY
 *
 * RATE > 0: so many requests begin each second, at their time and on any idle connection (a new one
 * when all are busy), whatever became of the others. RATE 0: CONNECTIONS ask without a pause.
 * Request i is session i mod SESSIONS's: its body is a chat whose first quarter all sessions share.
 * Prints "BEGIN" when it begins to count and, when every request that it counts is answered,
 * "END" and a line of JSON. A request is lost unless it is answered 200 and whole.
 */
#define _GNU_SOURCE
#include <errno.h>
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

#define PATIENCE_S 20.0

typedef struct Conn {
    int fd, connected, busy, counts, fresh;
    const char *out; size_t out_left;
    const char *request; size_t request_bytes;   /* what is asked, to send it anew */
    double due, first_at;
    char head[16384]; size_t head_have; int has_head, status, frames;
    size_t left;                     /* of a body with a length */
    char tail[8]; int tail_have, events;
    struct Conn *next_idle, *next;
} Conn;

static struct sockaddr_in to;
static int ep, is_stream, sessions, want_events;
static char **requests; static size_t *sizes;
static Conn *idle, *all;
static long sent, ok, lost, open_now, pending;
static double *totals, *firsts; static long noted, room, events_seen;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static unsigned long long seed;
static unsigned draw(void) { seed = seed * 6364136223846793005ULL + 1442695040888963407ULL; return seed >> 33; }

static void words(char **at, size_t n) {
    static const char *known[] = {"def ", "return ", "the ", "value ", "of ", "\\n    ", "if ", "self.", "import ",
        "assert ", "\\\"key\\\": ", "state ", "prefix ", "tokens, ", "x = 1; ", "cache "};
    char *end = *at + n;
    while (*at < end) {
        const char *word = known[draw() % 16];
        size_t w = strlen(word);
        if (*at + w > end) { memset(*at, 'x', end - *at); *at = end; return; }
        memcpy(*at, word, w); *at += w;
    }
}

/* A chat of messages of some 2 KB, as an agent sends it. */
static void make_request(int session, size_t bytes, const char *key) {
    static const char last[] = "\"}],\"max_tokens\":64";
    const char *stream = is_stream ? ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}" : "}";
    char *body = malloc(bytes + 4096), *at = body;
    at += sprintf(at, "{\"model\":\"fake\",\"messages\":[{\"role\":\"system\",\"content\":\"");
    size_t fixed = (at - body) + strlen(last) + strlen(stream), text = bytes > fixed ? bytes - fixed : 0;
    size_t shared = text / 4, done = 0;
    int role = 0;
    seed = 7;
    while (done < text) {
        size_t n = text - done < 2048 ? text - done : 2048;
        if (done < shared && done + n > shared) n = shared - done;
        if (done == shared) seed = 1000 + session;
        words(&at, n);
        done += n;
        if (done + 64 < text && done >= 512) {
            int w = sprintf(at, "\"},{\"role\":\"%s\",\"content\":\"", role++ % 2 ? "assistant" : "user");
            at += w; done += w;
        }
    }
    at += sprintf(at, "%s%s", last, stream);
    size_t n = at - body;
    char *whole = malloc(n + 1024);
    int h = sprintf(whole, "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n"
        "accept: application/json\r\ncontent-type: application/json\r\nuser-agent: OpenAI/Python 2.8.0\r\n"
        "authorization: Bearer %s\r\nx-session-id: session-%06d\r\ncontent-length: %zu\r\n\r\n",
        ntohs(to.sin_port), key, session, n);
    memcpy(whole + h, body, n);
    free(body);
    requests[session] = whole; sizes[session] = h + n;
}

static void arm(Conn *c, int op) {
    struct epoll_event e = {.events = EPOLLIN | (c->out_left || !c->connected ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(ep, op, c->fd, &e);
}

static void reopen(Conn *c) {
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    c->connected = connect(c->fd, (struct sockaddr *)&to, sizeof to) == 0;
    c->fresh = 1;
    arm(c, EPOLL_CTL_ADD);
}

static Conn *make(void) {
    Conn *c = calloc(1, sizeof *c);
    c->next = all; all = c; open_now++;
    reopen(c);
    return c;
}

static void flush_out(Conn *c) {
    while (c->out_left && c->connected) {
        ssize_t w = send(c->fd, c->out, c->out_left, MSG_NOSIGNAL);
        if (w < 0) { if (errno == EAGAIN) { arm(c, EPOLL_CTL_MOD); return; } c->out_left = 0; return; }
        c->out += w; c->out_left -= w;
        if (!c->out_left) { arm(c, EPOLL_CTL_MOD); return; }
    }
}

static void ask(Conn *c, long number, double due, int counts) {
    int session = number % sessions;
    c->busy = 1; c->counts = counts; c->due = due; c->first_at = 0;
    c->request = c->out = requests[session]; c->request_bytes = c->out_left = sizes[session];
    c->head_have = c->has_head = c->status = c->frames = c->events = c->tail_have = 0; c->left = 0;
    if (counts) { sent++; pending++; }
    flush_out(c);
}

static void over(Conn *c, int good) {
    double at = now();
    if (c->counts) {
        pending--;
        if (good) {
            ok++;
            if (noted < room) { totals[noted] = at - c->due; firsts[noted] = c->first_at - c->due; noted++; }
            events_seen += c->events;
        } else lost++;
    }
    c->busy = 0;
    if (good) { c->fresh = 0; c->next_idle = idle; idle = c; return; }
    close(c->fd);
    reopen(c);
    c->next_idle = idle; idle = c;
}

/* A kept connection that was closed before a byte of an answer came is asked anew: any client does. */
static void broken(Conn *c) {
    if (!c->busy) {                  /* idle: it leaves the list when it is taken */
        close(c->fd);
        reopen(c);
        return;
    }
    if (!c->fresh && !c->head_have && !c->has_head) {
        close(c->fd);
        c->out = c->request; c->out_left = c->request_bytes;
        reopen(c);
        return;
    }
    over(c, 0);
}

static void count_events(Conn *c, const char *data, size_t n) {
    const char *at = data, *end = data + n;
    while ((at = memmem(at, end - at, "data: ", 6))) { c->events++; at += 6; }
    if (c->events && !c->first_at) c->first_at = now();
}

/* Take in body bytes; return 1 when the body is whole. */
static int body(Conn *c, const char *data, size_t n) {
    if (is_stream) count_events(c, data, n);
    else if (!c->first_at && n) c->first_at = now();
    if (!c->frames) { c->left -= n < c->left ? n : c->left; return c->left == 0; }
    if (n >= 5) { memcpy(c->tail, data + n - 5, 5); c->tail_have = 5; }
    else for (size_t i = 0; i < n; i++) {
        if (c->tail_have == 5) memmove(c->tail, c->tail + 1, 4), c->tail_have = 4;
        c->tail[c->tail_have++] = data[i];
    }
    return c->tail_have == 5 && !memcmp(c->tail, "0\r\n\r\n", 5);
}

static void on_input(Conn *c) {
    static char data[262144];
    for (;;) {
        ssize_t n = recv(c->fd, data, sizeof data, 0);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0 || !c->busy) { broken(c); return; }
        const char *rest = data; size_t left = n;
        if (!c->has_head) {
            size_t take = sizeof c->head - 1 - c->head_have;
            size_t before = c->head_have;
            if (take > left) take = left;
            memcpy(c->head + c->head_have, data, take);
            c->head_have += take; c->head[c->head_have] = 0;
            char *end = memmem(c->head, c->head_have, "\r\n\r\n", 4);
            if (!end) { if (c->head_have == sizeof c->head - 1) { over(c, 0); return; } continue; }
            c->has_head = 1;
            size_t used = end + 4 - c->head - before;
            rest += used; left -= used;
            end[2] = 0;
            c->status = atoi(c->head + 9);
            const char *length = strcasestr(c->head, "\r\ncontent-length:");
            c->frames = strcasestr(c->head, "\r\ntransfer-encoding:") != NULL;
            if (length) c->left = strtoul(length + 17, NULL, 10);
            if (!left && (c->frames || c->left)) continue;
        }
        if (body(c, rest, left)) {
            if (c->status != 200 && getenv("SHOW_LOST")) fprintf(stderr, "%d: %.*s\n", c->status, (int)left, rest);
            over(c, c->status == 200 && (!is_stream || c->events == want_events));
            return;
        }
        if ((size_t)n < sizeof data) return;
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(double *)a, y = *(double *)b;
    return x < y ? -1 : x > y;
}

static double part(double *values, double share) {
    return noted ? values[(long)(share * (noted - 1))] * 1e6 : 0;
}

int main(int argc, char **argv) {
    (void)argc;
    int connections = atoi(argv[3]);
    double rate = atof(argv[2]), warm = atof(argv[4]), seconds = atof(argv[5]);
    size_t bytes = atol(argv[6]);
    is_stream = atoi(argv[7]); sessions = atoi(argv[8]);
    want_events = is_stream ? is_stream + 1 : 0;      /* with [DONE] */
    const char *key = argv[9];
    signal(SIGPIPE, SIG_IGN);
    to = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    requests = calloc(sessions, sizeof *requests); sizes = calloc(sessions, sizeof *sizes);
    for (int i = 0; i < sessions; i++) make_request(i, bytes, key);
    room = 2000000; totals = malloc(room * sizeof *totals); firsts = malloc(room * sizeof *firsts);
    ep = epoll_create1(0);
    for (int i = 0; i < connections; i++) { Conn *c = make(); c->next_idle = idle; idle = c; }
    double start = now(), begins = start + warm, ends = begins + seconds;
    int has_begun = 0;
    long number = 0;
    for (;;) {
        double at = now();
        if (!has_begun && at >= begins) { has_begun = 1; printf("BEGIN\n"); fflush(stdout); }
        if (at >= ends && pending == 0) break;
        if (at >= ends + PATIENCE_S) { lost += pending; break; }
        double next = begins > at ? begins : ends > at ? ends : at + 0.05;
        if (rate > 0) {
            double due = start + number / rate;
            while (due <= at && due < ends) {
                Conn *c = idle;
                if (c) idle = c->next_idle; else c = make();
                ask(c, number++, due, due >= begins);
                due = start + number / rate;
            }
            if (due < ends && due < next) next = due;
        } else if (at < ends) {
            while (idle) { Conn *c = idle; idle = c->next_idle; ask(c, number++, now(), at >= begins); }
        }
        double left = next - now();
        if (left < 0) left = 0;
        struct timespec wait = {.tv_sec = left, .tv_nsec = (left - (long)left) * 1e9};
        struct epoll_event got[256];
        int n = epoll_pwait2(ep, got, 256, &wait, NULL);
        for (int i = 0; i < n; i++) {
            Conn *c = got[i].data.ptr;
            if (!c->connected && (got[i].events & EPOLLOUT)) { c->connected = 1; arm(c, EPOLL_CTL_MOD); }
            if (got[i].events & EPOLLOUT) { flush_out(c); if (!c->out_left) arm(c, EPOLL_CTL_MOD); }
            if (got[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) on_input(c);
        }
    }
    double took = now() - begins;
    qsort(totals, noted, sizeof *totals, by_value);
    qsort(firsts, noted, sizeof *firsts, by_value);
    printf("END\n{\"sent\":%ld,\"ok\":%ld,\"lost\":%ld,\"seconds\":%.6f,\"events\":%ld,\"first_p50_us\":%.1f,"
        "\"first_p99_us\":%.1f,\"whole_p50_us\":%.1f,\"whole_p99_us\":%.1f}\n", sent, ok, lost, took, events_seen,
        part(firsts, 0.5), part(firsts, 0.99), part(totals, 0.5), part(totals, 0.99));
    return 0;
}
