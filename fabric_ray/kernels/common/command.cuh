// Commands for the proxy (uccl-ep §3.1), encoded as native/proxy decodes them. Offsets and lengths are bytes,
// multiples of 16; a write has at most 512 KiB. What doesn't fit is cut off here, and the proxy's decoder says what it
// can.
#pragma once

#include "common/command_layout.h"
#include "common/vendor.cuh"

namespace fr {

struct Command {
  u64 words[2];
};

#define FR_CMD_FIELD(NAME) FR_CMD_##NAME##_WORD, FR_CMD_##NAME##_SHIFT, FR_CMD_##NAME##_BITS

FR_DEVICE void put(Command& command, u32 word, u32 shift, u32 bits, u64 value) {
  command.words[word] |= (value & ((1ull << bits) - 1)) << shift;
}

struct Target {
  u32 rank;
  u32 channel;
};

// An addition to one of the target's atomic words.
struct Add {
  u32 slot;
  bool ordered;
  i64 value;
};

FR_DEVICE Command command_to(u32 kind, Target target) {
  Command command = {{0, 0}};
  put(command, FR_CMD_FIELD(KIND), kind);
  put(command, FR_CMD_FIELD(RANK), target.rank);
  put(command, FR_CMD_FIELD(CHANNEL), target.channel);
  return command;
}

FR_DEVICE Command write_command(Target target, u64 from, u64 to, u32 nbytes) {
  Command command = command_to(FR_CMD_WRITE, target);
  put(command, FR_CMD_FIELD(LOW), from / FR_CMD_UNIT);
  put(command, FR_CMD_FIELD(HIGH), to / FR_CMD_UNIT);
  put(command, FR_CMD_FIELD(LENGTH), nbytes / FR_CMD_UNIT - 1);
  return command;
}

// The value has 16 bits here.
FR_DEVICE Command write_add_command(Target target, u64 from, u64 to, u32 nbytes, Add add) {
  Command command = write_command(target, from, to, nbytes);
  command.words[FR_CMD_KIND_WORD] &= ~(((1ull << FR_CMD_KIND_BITS) - 1) << FR_CMD_KIND_SHIFT);
  put(command, FR_CMD_FIELD(KIND), FR_CMD_WRITE_ATOMIC);
  put(command, FR_CMD_FIELD(FLAG), add.ordered);
  put(command, FR_CMD_FIELD(SLOT), add.slot);
  put(command, FR_CMD_FIELD(ADDEND), static_cast<u64>(add.value));
  return command;
}

FR_DEVICE Command add_command(Target target, Add add) {
  Command command = command_to(FR_CMD_ATOMIC, target);
  put(command, FR_CMD_FIELD(FLAG), add.ordered);
  put(command, FR_CMD_FIELD(SLOT), add.slot);
  put(command, FR_CMD_FIELD(LOW), static_cast<u64>(add.value));
  put(command, FR_CMD_FIELD(HIGH), static_cast<u64>(add.value) >> 32);
  return command;
}

// Of all that this FIFO's commands sent.
FR_DEVICE Command drain_command() { return command_to(FR_CMD_DRAIN, Target{0, 0}); }

FR_DEVICE Command drain_command(u64 up_to) {
  Command command = drain_command();
  put(command, FR_CMD_FIELD(FLAG), 1);
  put(command, FR_CMD_FIELD(LOW), up_to);
  return command;
}

FR_DEVICE Command barrier_command(u32 channel, bool rail) {
  Command command = command_to(FR_CMD_BARRIER, Target{0, channel});
  put(command, FR_CMD_FIELD(FLAG), rail);
  return command;
}

}  // namespace fr
