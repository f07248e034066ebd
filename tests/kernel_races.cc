// Steps of an exchange as one launch, whose blocks and lanes are threads: built with ThreadSanitizer, it reports what two
// of them touch without an order. Each block has a library of its own, named by the arguments, for what its threads share
// is static there.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "moe/steps.cu"

namespace {

constexpr u32 TOKENS = 90, TOPK = 3, EXPERTS = 8, HIDDEN = 128, ROWS = TOKENS * TOPK, THREADS = 2 * WARP;
constexpr u32 ROW = 144;  // 128 of e4m3, a float, and what fills up to 16
using Launch = void (*)(u32, u32, u32, u32, const void*);

void launch(const std::vector<void*>& libraries, const std::string& kernel, const Steps& steps) {
  u32 n = libraries.size();
  std::vector<std::thread> blocks;
  for (u32 i = 0; i < n; ++i) {
    auto run = reinterpret_cast<Launch>(dlsym(libraries[i], (kernel + "_on_host").c_str()));
    blocks.emplace_back([=, &steps] { run(i, i + 1, n, THREADS, &steps); });
  }
  for (auto& one : blocks) one.join();
}

template <class T>
std::vector<T> words(size_t n) {
  return std::vector<T>(n, T{});
}

Step& add(Steps& steps, Kind kind, u32 flags = 0) {
  Step& step = steps.step[steps.n++];
  step.kind = kind;
  step.flags = flags;
  return step;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<void*> libraries;
  for (int i = 1; i < argc; ++i) {
    libraries.push_back(dlopen(argv[i], RTLD_NOW | RTLD_LOCAL));
    if (!libraries.back()) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  }
  auto indices = words<i64>(ROWS), kept = words<i64>(ROWS), wide = words<i64>(2 * EXPERTS);
  for (u32 i = 0; i < ROWS; ++i) indices[i] = (i / TOPK * 5 + i % TOPK) % EXPERTS;
  auto tile_counts = words<u32>(8 * EXPERTS), counts = words<u32>(EXPERTS), starts = words<u32>(EXPERTS + 1);
  auto first = words<u32>(2), token_of = words<u32>(ROWS), row_of = words<u32>(ROWS);
  auto from = words<u32>(EXPERTS + 1), to = words<u32>(EXPERTS), totals = words<u32>(EXPERTS);
  auto placed = words<u32>(EXPERTS + 1), given = words<u32>(EXPERTS);
  auto tile_faults = words<u64>(8), meeting = words<u64>(16), layout = words<u64>(EXPERTS);
  u64 route_fault = 0, place_fault = 0, over = 2, ready = 1, value = 1, gate = 1, index = 0, completed = 0;
  u32 tokens = 0, now = 0, waited = 9;
  auto values = words<u64>(1), grows = words<u64>(1);
  grows[0] = 2;
  auto slots = words<u64>(64), note = words<u64>(4), told = words<u64>(4), table = words<u64>(4), chunks = words<u64>(4);
  auto listed_ways = words<u64>(3), ways = words<u64>(3);
  Pushers pushers{};
  Patience patience{nullptr, 60000000000ull};
  auto x = words<u16>(TOKENS * HIDDEN), bits = words<u16>(ROWS * HIDDEN);
  for (u32 i = 0; i < x.size(); ++i) x[i] = 0x3f80 + i % 97;
  auto x8 = words<u8>(TOKENS * HIDDEN), own = words<u8>(ROWS * ROW), got = words<u8>(ROWS * HIDDEN);
  auto scales = words<float>(TOKENS), scaled = words<float>(ROWS), sums = words<float>(TOKENS * HIDDEN);
  auto part = [](auto& rows, u32 width) {
    return Part{reinterpret_cast<u8*>(rows.data()), width, width, 0};
  };
  // One chunk of all rows, as the host lists it.
  table = {u64(ROWS) << 32, 0, 0, 0};

  const u32 turns = 3;
  for (u32 turn = 0; turn < turns; ++turn) {
    over = 2 * (turn + 1);
    Steps steps{};
    steps.meeting = meeting.data();
    add(steps, BEGIN_EXCHANGE, ALONE).begin = {
        patience, &over, values.data(), grows.data(), 1, TOKENS, &tokens, &now, &waited, &gate};
    Routing routing{indices.data(), &now, TOPK, EXPERTS, 1, TOKENS, tile_counts.data(), tile_faults.data(),
                    counts.data(), starts.data(), first.data(), token_of.data(), row_of.data(), &route_fault,
                    kept.data()};
    add(steps, COUNT_ROUTES).routing = routing;
    add(steps, SUM_ROUTES, ALONE).routing = routing;
    add(steps, TELL_HOST, ALONE).tell = {Fifo{slots.data(), &pushers, &completed, 32}, patience, {1, 2}, &gate,
                                         note.data(), told.data(), 4, nullptr, &index, &waited};
    add(steps, PLACE_ROUTES).routing = routing;
    add(steps, CAST_ROWS, BESIDE).cast = {part(x, 2 * HIDDEN), part(x8, HIDDEN), part(scales, 4), TOKENS, HIDDEN,
                                          SCALE_F32, 0};
    add(steps, FETCH_WORDS, ALONE | BESIDE).fetch = {patience, &ready, &value, &waited, &gate, listed_ways.data(),
                                                     ways.data(), 3, 0};
    PackRows pack{&now, row_of.data(), TOKENS, TOPK, own.data(), ROW, 2, 0, {}, first.data(), ways.data(), 1};
    pack.part[0] = part(x8, HIDDEN);
    pack.part[1] = part(scales, 4);
    add(steps, PACK_ROWS).pack = pack;
    add(steps, PLACE_ROWS, ALONE).incoming = {counts.data(), EXPERTS, 1, EXPERTS, 1, 0, ROWS, ROWS, from.data(),
                                              to.data(), totals.data(), placed.data(), &place_fault, wide.data(),
                                              wide.data() + EXPERTS, given.data(), nullptr};
    add(steps, FETCH_WORDS, ALONE).fetch = {patience, &ready, &value, &waited, &gate, table.data(), chunks.data(), 4, 0};
    Places places{from.data(), to.data(), &place_fault, EXPERTS, 0};
    u32 one = 1;
    Chunks listed{reinterpret_cast<const Chunk*>(chunks.data()), &one};
    HandOut hand_out{places, listed, own.data(), ROW, 2, 1, {}, nullptr, 0, 0};
    hand_out.part[0] = part(got, HIDDEN);
    hand_out.part[1] = part(scaled, 4);
    add(steps, HAND_OUT).hand_out = hand_out;
    add(steps, PACK_ANSWERS).answers = {places, listed, part(got, HIDDEN), own.data(), ROW};
    launch(libraries, "run_steps", steps);

    Steps sum{};
    sum.meeting = meeting.data() + 8;
    add(sum, FETCH_WORDS, ALONE).fetch = {patience, &ready, &value, &waited, &gate, table.data(), chunks.data(), 4, 0};
    WeightedSum of{};
    of.answers = reinterpret_cast<u8*>(bits.data());
    of.answers_stride = 2 * HIDDEN;
    of.tokens = &now;
    of.row_of = row_of.data();
    of.max_tokens = TOKENS;
    of.topk = TOPK;
    of.elements = HIDDEN;
    of.ranks = 1;
    of.first = first.data();
    of.out = reinterpret_cast<u8*>(sums.data());
    of.out_stride = 4 * HIDDEN;
    of.experts = kept.data();
    add(sum, SUM_ANSWERS).sum = of;
    add(sum, TELL_HOST, ALONE).tell = {Fifo{slots.data(), &pushers, &completed, 32}, patience, {1, 2}, &gate,
                                       nullptr, nullptr, 0, nullptr, &index, &waited};
    launch(libraries, "sum_bf16_f32", sum);
    u32 rows = 0;
    for (u32 n : totals) rows += n;
    if (rows != ROWS || ~route_fault || ~place_fault || index != 2 * turn + 1 || scaled[0] == 0) {
      std::fprintf(stderr, "turn %u: %u rows of %u, faults %llx %llx, %llu commands\n", turn, rows, ROWS, route_fault,
                   place_fault, index + 1);
      return 3;
    }
  }
  return 0;
}
