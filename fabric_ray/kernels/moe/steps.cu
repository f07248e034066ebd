// The steps of an exchange, several in one launch: a step begins when all blocks are done with those before it. Steps of
// one block in a row need no such meeting, and one that says so runs beside what came before.
#include "moe/cast.cuh"
#include "moe/mailbox.cuh"
#include "moe/move.cuh"
#include "moe/pack.cuh"
#include "moe/place.cuh"
#include "moe/routes.cuh"
#include "moe/sum.cuh"

using namespace fr;

// In the order of fabric_ray/kernels/steps.py.
enum Kind : u32 {
  BEGIN_EXCHANGE,
  FETCH_WORDS,
  TELL_HOST,
  COUNT_ROUTES,
  SUM_ROUTES,
  PLACE_ROUTES,
  PACK_ROWS,
  PLACE_ROWS,
  HAND_OUT,
  PACK_ANSWERS,
  SUM_ANSWERS,
  CAST_ROWS,
};

enum Flags : u32 {
  ALONE = 1,   // the first block does it
  BESIDE = 2,  // needs nothing of the steps before
};

struct Step {
  u32 kind;
  u32 flags;
  union {
    BeginExchange begin;
    FetchWords fetch;
    TellHost tell;
    Routing routing;
    PackRows pack;
    Incoming incoming;
    HandOut hand_out;
    PackAnswers answers;
    WeightedSum sum;
    CastRows cast;
  };
};

constexpr u32 MAX_STEPS = 12;

struct Steps {
  u64* meeting;  // of `sync_blocks`; may be null for a single step
  u32 n;
  u32 unused;
  Step step[MAX_STEPS];
};

// Answers to sums of other formats: kernels of their own, as registers are the largest need of all that a kernel has.
template <class In, class Out>
struct Sums {
  FR_DEVICE static void run(const Step& step, Blocks by) {
    switch (step.kind) {
      case FETCH_WORDS: return fetch_words(step.fetch);
      case TELL_HOST: return tell_host(step.tell);
      case SUM_ANSWERS: return sum_answers<In, Out>(step.sum, by);
    }
  }
};

struct Moves {
  FR_DEVICE static void run(const Step& step, Blocks by) {
    switch (step.kind) {
      case BEGIN_EXCHANGE: return begin_exchange(step.begin);
      case FETCH_WORDS: return fetch_words(step.fetch);
      case TELL_HOST: return tell_host(step.tell);
      case COUNT_ROUTES: return count_routes(step.routing, by);
      case SUM_ROUTES: return sum_routes(step.routing);
      case PLACE_ROUTES: return place_routes(step.routing, by);
      case PACK_ROWS: return pack_rows(step.pack, by);
      case PLACE_ROWS: return place_rows(step.incoming);
      case HAND_OUT: return hand_out(step.hand_out, by);
      case PACK_ANSWERS: return pack_answers(step.answers, by);
      case CAST_ROWS: return cast_rows(step.cast, by);
    }
  }
};

template <class What>
FR_DEVICE void run(const Steps& p) {
  // Whether all steps since the last meeting were the first block's.
  bool alone = true;
#pragma unroll 1
  for (u32 i = 0; i < p.n; ++i) {
    const Step& step = p.step[i];
    bool of_one = (step.flags & ALONE) != 0;
    if (i != 0 && !(step.flags & BESIDE)) {
      if (of_one && alone)
        sync_block();
      else {
        sync_blocks(p.meeting);
        alone = true;
      }
    }
    alone &= of_one;
    if (!of_one)
      What::run(step, Blocks{block(), blocks()});
    else if (block() == 0)
      What::run(step, Blocks{0, 1});
  }
}

FR_KERNEL_OF_TWO(run_steps, Steps) { run<Moves>(p); }

#define FR_SUM(name, In, Out) \
  FR_KERNEL_OF_TWO(name, Steps) { run<Sums<In, Out>>(p); }

FR_SUM(sum_f32_f32, F32, F32)
FR_SUM(sum_f32_bf16, F32, Bf16)
FR_SUM(sum_f32_f16, F32, F16)
FR_SUM(sum_bf16_f32, Bf16, F32)
FR_SUM(sum_bf16_bf16, Bf16, Bf16)
FR_SUM(sum_bf16_f16, Bf16, F16)
FR_SUM(sum_f16_f32, F16, F32)
FR_SUM(sum_f16_bf16, F16, Bf16)
FR_SUM(sum_f16_f16, F16, F16)
