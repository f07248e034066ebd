// Between kernels: commands to the proxy, and waits for words that the host writes.
#include "common/fifo.cuh"

using namespace fr;

struct PushCommands {
  Fifo fifo;
  Patience patience;
  const u64* commands;  // two words each
  const u32* n;
  u32 at_once;  // a warp's commands with one claim, or each by its own thread
  u32 unused;
  u64* indices;  // of each command, or all ones: it wasn't pushed
  u32* waited;   // of each command, how its push ended
};

FR_KERNEL(push_commands, PushCommands) {
  Fifo fifo = p.fifo;
  u32 n = *p.n, all = blocks() * threads();
  // Whole warps go round together.
  for (u32 begin = block() * threads() + thread() - lane(); begin < n; begin += all) {
    u32 i = begin + lane();
    Command command = {{0, 0}};
    if (i < n) command = Command{{p.commands[2 * i], p.commands[2 * i + 1]}};
    u64 index = ~0ull;
    Waited waited = READY;
    if (p.at_once)
      waited = fifo.push_warp(i < n, command, p.patience, &index);
    else if (i < n)
      waited = fifo.push(command, p.patience, &index);
    if (i < n) {
      p.indices[i] = waited == READY ? index : ~0ull;
      p.waited[i] = waited;
    }
  }
}

struct AwaitCommand {
  Fifo fifo;
  Patience patience;
  const u64* index;
  u32* waited;
};

FR_KERNEL(await_command, AwaitCommand) {
  if (block() == 0 && thread() == 0) *p.waited = p.fifo.wait(*p.index, p.patience);
}

struct AwaitWord {
  const u64* word;
  const u64* value;
  Patience patience;
  u32* waited;
  u64* gate;  // becomes 0 unless the word came, and stays so; may be null
};

FR_KERNEL(await_word, AwaitWord) {
  if (block() != 0 || thread() != 0) return;
  Waited waited = wait_at_least(p.word, *p.value, p.patience);
  *p.waited = waited;
  if (p.gate && waited != READY) *p.gate = 0;
}
