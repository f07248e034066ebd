/* 128-bit commands of the device-to-host channel; generated from native/proxy/src/command.rs */
#pragma once

#define FR_CMD_UNIT 16
#define FR_CMD_LAP_BIT 63
#define FR_CMD_WRITE 1
#define FR_CMD_WRITE_ATOMIC 2
#define FR_CMD_ATOMIC 3
#define FR_CMD_DRAIN 4
#define FR_CMD_BARRIER 5
#define FR_CMD_KIND_WORD 0
#define FR_CMD_KIND_SHIFT 60
#define FR_CMD_KIND_BITS 3
#define FR_CMD_FLAG_WORD 0
#define FR_CMD_FLAG_SHIFT 59
#define FR_CMD_FLAG_BITS 1
#define FR_CMD_CHANNEL_WORD 0
#define FR_CMD_CHANNEL_SHIFT 54
#define FR_CMD_CHANNEL_BITS 5
#define FR_CMD_RANK_WORD 0
#define FR_CMD_RANK_SHIFT 44
#define FR_CMD_RANK_BITS 10
#define FR_CMD_SLOT_WORD 0
#define FR_CMD_SLOT_SHIFT 32
#define FR_CMD_SLOT_BITS 12
#define FR_CMD_LOW_WORD 0
#define FR_CMD_LOW_SHIFT 0
#define FR_CMD_LOW_BITS 32
#define FR_CMD_LENGTH_WORD 1
#define FR_CMD_LENGTH_SHIFT 48
#define FR_CMD_LENGTH_BITS 15
#define FR_CMD_ADDEND_WORD 1
#define FR_CMD_ADDEND_SHIFT 32
#define FR_CMD_ADDEND_BITS 16
#define FR_CMD_HIGH_WORD 1
#define FR_CMD_HIGH_SHIFT 0
#define FR_CMD_HIGH_BITS 32
