// Jobs of each kind for two workers, as the host posts them while they run: built with
// ThreadSanitizer, it reports what two lanes of a worker, or a worker and the host, touch without an
// order. Workers are libraries, named by the arguments.
#include <dlfcn.h>

#include <cstdio>
#include <initializer_list>
#include <thread>
#include <vector>

#include "moe/work.cu"

namespace {

constexpr u32 THREADS = 2 * WARP, WORKERS = 2, PLACES = 4, JOB = 64;
constexpr u32 JOBS = LINE * (1 + 2 * WORKERS);
constexpr u32 ELEMENTS = 40, META = 16, STRIDE = META + 4 * ELEMENTS, CALLS = 4;
constexpr u64 EXCHANGE = 7, TOKEN = 1;
using Launch = void (*)(u32, u32, u32, u32, const void*);

struct Host {
  std::vector<u64> words = std::vector<u64>(JOBS + WORKERS * PLACES * JOB);
  u64 posted[WORKERS] = {};

  u64* job(u32 worker, u64 i) { return words.data() + JOBS + (worker * PLACES + i % PLACES) * JOB; }

  // Waits for the job, and returns its place.
  u64* run(u32 worker, u64 kind, u64 n, u64 a, u64 b, std::initializer_list<u64> about) {
    u64 i = posted[worker]++;
    u64* place = job(worker, i);
    u64 header[] = {kind, n, a, b, about.size()};
    for (u32 k = 0; k < 5; ++k) place[k] = header[k];
    place[8] = ~0ull;
    u64* to = place + HEADER;
    for (u64 word : about) *to++ = word;
    u64* line = words.data() + LINE * (1 + 2 * worker);
    __atomic_store_n(line, i + 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(line + LINE, __ATOMIC_ACQUIRE) <= i) std::this_thread::yield();
    return place;
  }
};

}  // namespace

int main(int argc, char** argv) {
  Host host;
  int wrong = 0;
  std::vector<u64> scratch(WORKERS * JOB), region(64 * STRIDE / 8);
  std::vector<float> x(8 * ELEMENTS), rows(x.size()), totals(x.size()), of_node(x.size());
  for (u32 i = 0; i < x.size(); ++i) x[i] = i;
  auto part = [](std::vector<float>& of) {
    return Part{reinterpret_cast<u8*>(of.data()), 4 * ELEMENTS, 4 * ELEMENTS, 0};
  };
  for (u64 call = 1; call <= CALLS; ++call) {
    // Tokens are sent in one call, and taken in the next.
    const bool sends = call % 2;
    std::vector<std::thread> workers;
    for (u32 w = 0; w < WORKERS; ++w) {
      if (argc <= static_cast<int>(w + 1)) return 2;
      void* library = dlopen(argv[w + 1], RTLD_NOW | RTLD_LOCAL);
      if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 2;
      Work p{};
      p.shared = host.words.data();
      p.jobs = JOBS, p.job_words = JOB, p.depth = PLACES;
      p.call = call, p.timeout_ns = 60000000000ull, p.first = w;
      p.scratch = scratch.data();
      p.region = reinterpret_cast<u8*>(region.data());
      p.out_stride = STRIDE, p.meta = META, p.elements = ELEMENTS;
      p.of_node = reinterpret_cast<u8*>(of_node.data()), p.of_node_stride = 4 * ELEMENTS;
      p.totals = totals.data();
      p.answers = part(rows);
      p.parts = 1;
      p.part[0] = part(sends ? x : rows);
      auto launch = reinterpret_cast<Launch>(dlsym(library, "work_f32_on_host"));
      workers.emplace_back([=] { launch(0, 1, 1, THREADS, &p); });
    }
    // What one worker has done, the other one reads: in order by way of the host alone.
    for (u32 w = 0; w < WORKERS; ++w) {
      host.run(w, PUT, 2, 32 * STRIDE, 0, {5, 6});
      if (sends) host.run(w, PACK, 2, 1, 0, {11, 12, 13, 14});
      u64* seen = host.run(1 - w, LOOK, 2, 2, 0, {1 * STRIDE, 2 * STRIDE});
      if (seen[HEADER + 2] != 11 || seen[HEADER + 5] != 14) wrong = 3;
      if (sends) continue;
      host.run(1 - w, TAKE, 1, 0, 0, {1 * STRIDE, 2, u64(3) | u64(4) << 32});
      // Rows to the node's sum, that to a slot's, and a slot's to the total.
      u64 one = bits_of(1.0f), slot = 40 * STRIDE;
      u64 two_terms = TOKEN | 2ull << 32, one_term = TOKEN | 1ull << 32;
      host.run(w, SUM, 1, TO_NODE, EXCHANGE,
               {0, two_terms, 3, one | u64(ROW) << 32, 4, one | u64(LAST_ROW) << 32});
      host.run(1 - w, SUM, 1, TO_SLOT, EXCHANGE, {slot, one_term, 0, u64(OF_NODE) << 32});
      u64* found = host.run(w, SUM, 1, TO_TOTAL, EXCHANGE, {0, one_term, slot, u64(SLOT) << 32});
      float* at = reinterpret_cast<float*>(region.data()) + slot / 4 + 4;
      if (found[8] != ~0ull || totals[TOKEN * ELEMENTS + 5] != at[5]) wrong = 4;
      // A slot of another exchange is found.
      found = host.run(w, SUM, 1, TO_TOTAL, EXCHANGE + 1, {0, one_term, slot, u64(SLOT) << 32});
      if (found[8] != 0 || found[9] != (NODE_SUM | EXCHANGE << 32)) wrong = 5;
    }
    __atomic_store_n(host.words.data() + STOP, call, __ATOMIC_RELEASE);
    for (auto& one : workers) one.join();
  }
  if (rows[3 * ELEMENTS + 1] == 0 || of_node[TOKEN * ELEMENTS + 1] == 0) wrong = 6;
  return wrong;
}
