// What an exchange on the device shares with its host: steps of one block, each after all before it.
#pragma once

#include "common/fifo.cuh"

namespace fr {

struct BeginExchange {
  Patience patience;
  const u64* over;   // the host's word
  u64* values;       // of each wait, what is waited for; the first is for `over`
  const u64* grows;  // by how much that grows with each exchange
  u32 waits;
  u32 tokens;
  u32* given;   // takes the tokens of this exchange,
  u32* now;     // and those that are packed: none once a wait failed (MR-1)
  u32* waited;
  u64* gate;  // becomes 0 unless the word came, and stays so
};

// Waits are for the next exchange from now on; and the one before is over.
FR_DEVICE void begin_exchange(const BeginExchange& p) {
  for (u32 i = thread(); i < p.waits; i += threads())
    if (i != 0) p.values[i] += p.grows[i];
  if (thread() != 0) return;
  u64 value = p.values[0] + p.grows[0];
  Waited waited = wait_at_least(p.over, value, p.patience);
  if (waited != READY) *p.gate = 0;
  *p.waited = waited;
  // One more when answers are summed.
  p.values[0] = value & ~1ull;
  *p.given = p.tokens;
  *p.now = *p.gate ? p.tokens : 0;
}

struct FetchWords {
  Patience patience;
  const u64* word;  // null: nothing is waited for
  const u64* value;
  u32* waited;
  u64* gate;        // as above
  const u64* from;  // what the host wrote down before the word had that value
  u64* to;
  u64 words;
  u64 closed;  // stands for each of them once a wait failed: they may be another exchange's (RS-1)
};

FR_DEVICE void fetch_words(const FetchWords& p) {
  FR_SHARED u64 open;
  sync_block();
  if (thread() == 0) {
    if (p.word) {
      Waited waited = wait_at_least(p.word, *p.value, p.patience);
      if (waited != READY) *p.gate = 0;
      *p.waited = waited;
    }
    open = *p.gate;
  }
  sync_block();
  for (u64 i = thread(); i < p.words; i += threads()) p.to[i] = open ? load_system(p.from + i) : p.closed;
  // The host sets `abort` before it clears its tables: what was copied meanwhile may be half of each.
  fence_system();
  sync_block();
  if (thread() == 0 && p.patience.abort && load_acquire(p.patience.abort) != 0) open = 0;
  sync_block();
  for (u64 i = thread(); i < p.words && !open; i += threads()) p.to[i] = p.closed;
}

struct TellHost {
  Fifo fifo;
  Patience patience;
  u64 command[2];  // its value is 0,
  const u64* gate;  // and grows by this: 0 once a wait failed
  const u64* from;  // words that the host reads when it hears the command
  u64* to;
  u64 words;
  u64* counter;  // grows by one; may be null
  u64* index;
  u32* waited;
};

FR_DEVICE void tell_host(const TellHost& p) {
  for (u64 i = thread(); i < p.words; i += threads()) p.to[i] = p.from[i];
  fence_system();
  sync_block();
  if (thread() != 0) return;
  Fifo fifo = p.fifo;
  u64 index = ~0ull;
  Command command = {{p.command[0] + *p.gate, p.command[1]}};
  Waited waited = fifo.push(command, p.patience, &index);
  *p.index = waited == READY ? index : ~0ull;
  *p.waited = waited;
  if (p.counter) ++*p.counter;
}

}  // namespace fr
