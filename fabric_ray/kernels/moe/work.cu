// What touches rows in a high-throughput exchange: jobs that the host posts while a rank is in a call, and workers, a block
// each, that carry them out. What jobs are is native/moe's `throughput/jobs.rs`; how they lie in memory that both reach, its
// `workers/device.rs`. Every place in a job was checked by the host.
#include "common/flag.cuh"
#include "common/floats.cuh"
#include "common/rows.cuh"

using namespace fr;

// Words of a line, which one side writes.
constexpr u32 LINE = 16;
constexpr u32 HEADER = LINE;
constexpr u64 HEAD = 16;
constexpr u32 STOP = 0, BEAT = 1;

struct Work {
  u64* shared;       // the words of all workers, and their jobs
  u64 jobs;          // words before the first job
  u64 job_words;     // from one job to the next
  u64 call;          // workers end when this call has
  u64 timeout_ns;    // and when the host hasn't moved for so long
  u32 depth;         // jobs of a worker
  u32 first;         // number of the first block's worker
  u64* scratch;      // a job for each worker, on the device
  u8* region;
  u64 out_stride;
  u32 meta;          // bytes ahead of a token
  u32 elements;      // of an answer
  u8* of_node;       // the node's sums of this rank's tokens
  u64 of_node_stride;
  float* totals;     // their sums over all nodes, elements behind one another
  Part answers;
  u32 parts;
  u32 unused;
  Part part[MAX_PARTS];  // the caller's tokens, or room for rows
};

enum Kind : u32 { PUT = 1, PACK = 2, LOOK = 3, TAKE = 4, SUM = 5 };
enum To : u32 { TO_ANSWER = 0, TO_SLOT = 1, TO_NODE = 2, TO_TOTAL = 3 };
enum How : u32 { SLOT = 0, ROW = 1, LAST_ROW = 2, OF_NODE = 3 };
// What slots say that they hold.
constexpr u32 ANSWER = 3, NODE_SUM = 4;

// A job as the host posts it: words ahead, and what it is about.
struct Job {
  u64* found;  // in the host's memory, what comes of it
  Kind kind;
  u32 n;
  u64 a, b;
  const u64* about;  // on the device
  u64* answer;       // in the host's memory
};

// Until there is another job, or there will be none: whether there is.
FR_DEVICE bool await_job(const Work& p, const u64* posted, u64 done) {
  u64 begin = now_ns(), beat = load_acquire(p.shared + BEAT);
  Backoff backoff{32};
  for (;;) {
    u64 n = load_acquire(posted);
    // A job that is posted when this call is over belongs to the next call.
    if (load_acquire(p.shared + STOP) >= p.call) return false;
    if (n > done) return n != ~0ull;
    u64 now = now_ns(), moved = load_acquire(p.shared + BEAT);
    if (moved != beat) {
      beat = moved;
      begin = now;
    }
    if (now - begin >= p.timeout_ns) return false;
    backoff.rest();
  }
}

// Copies a job to the device, at once: one way over the bus for all of it.
FR_DEVICE Job fetch(const Work& p, u32 worker, u64 i) {
  u64* at = p.shared + p.jobs + (worker * p.depth + i % p.depth) * p.job_words;
  u64* copy = p.scratch + worker * p.job_words;
  u32 words = HEADER + static_cast<u32>(at[4]);
  copy_row<LOW_DEPTH>(whole_block(), reinterpret_cast<u8*>(copy), reinterpret_cast<const u8*>(at), words * 8);
  sync_block();
  Job job;
  job.found = at + 8;
  job.kind = static_cast<Kind>(copy[0]);
  job.n = static_cast<u32>(copy[1]);
  job.a = copy[2];
  job.b = copy[3];
  job.about = copy + HEADER;
  job.answer = at + words;
  return job;
}

FR_DEVICE void copy_words(Team team, u8* to, const u64* from, u32 words) {
  u64* place = reinterpret_cast<u64*>(to);
  for (u32 i = team.index; i < words; i += team.size) place[i] = from[i];
}

// Whether a job's token is this warp's: as many tokens are on their way at a time as a block has warps.
FR_DEVICE bool is_own(u32 i) { return i % warps() == thread() / WARP; }

FR_DEVICE void pack(const Work& p, const Job& job) {
  Team team = whole_warp();
  for (u32 i = 0; i < job.n; ++i) {
    if (!is_own(i)) continue;
    u64 token = job.a + i;
    u8* to = p.region + token * p.out_stride;
    copy_words(team, to, job.about + static_cast<u64>(i) * (p.meta / 8), p.meta / 8);
    to += p.meta;
    for (u32 j = 0; j < p.parts; ++j) {
      copy_row(team, to, p.part[j].row(token), p.part[j].width);
      to += p.part[j].width;
    }
  }
}

// The first words of each slot, for the host.
FR_DEVICE void look(const Work& p, const Job& job) {
  u32 each = static_cast<u32>(job.a);
  for (u32 i = thread(); i < job.n * each; i += threads()) {
    const u64* slot = reinterpret_cast<const u64*>(p.region + job.about[i / each]);
    job.answer[i] = slot[i % each];
  }
}

FR_DEVICE void take(const Work& p, const Job& job) {
  const u32* rows = reinterpret_cast<const u32*>(job.about + 2 * job.n);
  for (u32 i = 0; i < job.n; ++i) {
    const u8* from = p.region + job.about[2 * i] + p.meta;
    u32 n = static_cast<u32>(job.about[2 * i + 1]);
    for (u32 j = 0; is_own(i) && j < p.parts; ++j) {
      u64 base = address(p.part[j].base), stride = p.part[j].stride;
      auto at = [=](u32 k) { return rows[k] == NONE ? 0 : base + rows[k] * stride; };
      spread_row(whole_warp(), from, p.part[j].width, at, n, 0, unit_of(base | stride));
      from += p.part[j].width;
    }
    rows += n;
  }
}

// One addend of a sum.
struct Term {
  const u8* values;
  float weight;
  How how;
};

FR_DEVICE Term term_of(const Work& p, const u64* words, u32 token) {
  Term term;
  term.how = static_cast<How>(words[1] >> 32);
  term.weight = float_of(static_cast<u32>(words[1]));
  if (term.how == SLOT)
    term.values = p.region + words[0] + HEAD;
  else if (term.how == OF_NODE)
    term.values = p.of_node + token * p.of_node_stride;
  else
    term.values = p.answers.row(words[0]);
  return term;
}

// Sums of one token's terms: of rows as they are, rounded with the last of them as if they came from another rank, and of
// all else.
template <class Float>
struct Sums {
  float of_rank = 0.0f, all = 0.0f;

  FR_DEVICE void take(const Term& term, typename Float::Bits bits, bool rounds) {
    float value = Float::read(bits);
    if (term.how != ROW && term.how != LAST_ROW) {
      all = add(all, value);
      return;
    }
    of_rank = add(of_rank, multiply(term.weight, value));
    if (term.how == LAST_ROW && rounds) {
      all = add(all, Float::read(Float::write(of_rank)));
      of_rank = 0.0f;
    }
  }
};

// Elements from `begin` on that lie together in 16 bytes of each term.
template <class Float>
struct Unit {
  static constexpr u32 EACH = 16 / sizeof(typename Float::Bits);
  union Bits {
    Vec16 whole;
    typename Float::Bits each[EACH];
  };
};

// Terms of a sum that are on their way at a time.
constexpr u32 TERMS_AHEAD = 4;

template <class Float>
FR_DEVICE void sum_units(Team team, const Work& p, const Job& job, const u64* terms, u32 n, u32 token, u8* out,
                         u32 units) {
  constexpr u32 EACH = Unit<Float>::EACH;
  To to = static_cast<To>(job.a);
  for (u32 i = team.index; i < units; i += team.size) {
    Sums<Float> sums[EACH];
    for (u32 first = 0; first < n; first += TERMS_AHEAD) {
      Term term[TERMS_AHEAD];
      typename Unit<Float>::Bits bits[TERMS_AHEAD];
#pragma unroll
      for (u32 j = 0; j < TERMS_AHEAD; ++j) {
        if (first + j < n) {
          term[j] = term_of(p, terms + 2 * (first + j), token);
          bits[j].whole = load_stream(reinterpret_cast<const Vec16*>(term[j].values) + i);
        }
      }
#pragma unroll
      for (u32 j = 0; j < TERMS_AHEAD; ++j) {
        if (first + j < n)
#pragma unroll
          for (u32 e = 0; e < EACH; ++e) sums[e].take(term[j], bits[j].each[e], to != TO_ANSWER);
      }
    }
    if (to == TO_TOTAL) {
#pragma unroll
      for (u32 e = 0; e < EACH; ++e) reinterpret_cast<float*>(out)[i * EACH + e] = sums[e].all;
      continue;
    }
    typename Unit<Float>::Bits bits;
#pragma unroll
    for (u32 e = 0; e < EACH; ++e)
      bits.each[e] = Float::write(to == TO_ANSWER ? sums[e].of_rank : sums[e].all);
    store_stream(reinterpret_cast<Vec16*>(out) + i, bits.whole);
  }
}

template <class Float>
FR_DEVICE void sum_elements(Team team, const Work& p, const Job& job, const u64* terms, u32 n,
                            u32 token, u8* out, u32 begin) {
  To to = static_cast<To>(job.a);
  for (u32 i = begin + team.index; i < p.elements; i += team.size) {
    Sums<Float> sums;
    for (u32 j = 0; j < n; ++j) {
      Term term = term_of(p, terms + 2 * j, token);
      auto bits = reinterpret_cast<const typename Float::Bits*>(term.values)[i];
      sums.take(term, bits, to != TO_ANSWER);
    }
    if (to == TO_TOTAL)
      reinterpret_cast<float*>(out)[i] = sums.all;
    else
      reinterpret_cast<typename Float::Bits*>(out)[i] =
          Float::write(to == TO_ANSWER ? sums.of_rank : sums.all);
  }
}

// The lowest term whose slot is not a token's, for the host.
FR_DEVICE void check_slots(Team team, const Work& p, const Job& job, const u64* terms, u64 before,
                           u32 n, u32 token, u64* fault) {
  u64 first = (static_cast<To>(job.a) == TO_TOTAL ? NODE_SUM : ANSWER) | job.b << 32;
  for (u32 j = team.index; j < n; j += team.size) {
    if (static_cast<How>(terms[2 * j + 1] >> 32) != SLOT) continue;
    const u64* head = reinterpret_cast<const u64*>(p.region + terms[2 * j]);
    if (head[0] != first || head[1] != token) atomic_min(fault, before + j);
  }
}

// The sum of a job's token `i`, whose `n` terms are behind so many others.
template <class Float>
FR_DEVICE void sum_token(Team team, const Work& p, const Job& job, u32 i, const u64* terms, u64 before,
                         u32 n, u64* fault) {
  To to = static_cast<To>(job.a);
  u32 token = static_cast<u32>(job.about[2 * i + 1]);
  check_slots(team, p, job, terms, before, n, token, fault);
  u8* out = p.region + job.about[2 * i] + HEAD;
  if (to == TO_NODE) out = p.of_node + token * p.of_node_stride;
  if (to == TO_TOTAL) out = reinterpret_cast<u8*>(p.totals + static_cast<u64>(token) * p.elements);
  if (to <= TO_SLOT && team.index == 0) {
    u64* head = reinterpret_cast<u64*>(out - HEAD);
    head[0] = (to == TO_ANSWER ? ANSWER : NODE_SUM) | job.b << 32;
    head[1] = token;
  }
  // Slots and sums begin at 16 bytes; the caller's rows, and wide sums of odd length, needn't.
  u64 places = address(p.answers.base) | p.answers.stride | p.of_node_stride;
  u32 units = unit_of(places) == 16 ? p.elements / Unit<Float>::EACH : 0;
  sum_units<Float>(team, p, job, terms, n, token, out, units);
  sum_elements<Float>(team, p, job, terms, n, token, out, units * Unit<Float>::EACH);
}

template <class Float>
FR_DEVICE void sum(const Work& p, const Job& job) {
  FR_SHARED u64 fault;
  if (thread() == 0) fault = ~0ull;
  sync_block();
  const u64* terms = job.about + 2 * job.n;
  u64 before = 0;
  for (u32 i = 0; i < job.n; ++i) {
    u32 n = static_cast<u32>(job.about[2 * i + 1] >> 32);
    if (is_own(i)) sum_token<Float>(whole_warp(), p, job, i, terms, before, n, &fault);
    terms += 2 * n;
    before += n;
  }
  sync_block();
  if (thread() != 0 || fault == ~0ull) return;
  const u64* term = job.about + 2 * job.n + 2 * fault;
  const u64* head = reinterpret_cast<const u64*>(p.region + term[0]);
  job.found[0] = fault;
  job.found[1] = head[0];
  job.found[2] = head[1];
}

template <class Float>
FR_DEVICE void work(const Work& p) {
  FR_SHARED u32 goes_on;
  u32 worker = p.first + block();
  u64* posted = p.shared + LINE * (1 + 2 * worker);
  u64* done = posted + LINE;
  // Only this worker writes it.
  u64 i = *done;
  for (;;) {
    if (thread() == 0) goes_on = await_job(p, posted, i);
    sync_block();
    if (!goes_on) return;
    Job job = fetch(p, worker, i);
    if (job.kind == PUT)
      copy_words(whole_block(), p.region + job.a, job.about, job.n);
    else if (job.kind == PACK)
      pack(p, job);
    else if (job.kind == LOOK)
      look(p, job);
    else if (job.kind == TAKE)
      take(p, job);
    else if (job.kind == SUM)
      sum<Float>(p, job);
    ++i;
    sync_block();
    if (thread() != 0) continue;
    // A reader of the count, on the device or a NIC, also sees all writes of the job.
    fence_system();
    store_release(done, i);
  }
}

#define FR_WORK(name, Float) \
  FR_KERNEL(name, Work) { work<Float>(p); }

FR_WORK(work_f32, F32)
FR_WORK(work_bf16, Bf16)
FR_WORK(work_f16, F16)
