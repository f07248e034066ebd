//! Commands of a device to its proxy: 128 bits, a `TransferCmd` (uccl-ep §3.1).
//!
//! Two words of 64 bits, little-endian, word 0 first. Bit 63 of either word belongs to the
//! [`fifo`](crate::fifo).
//!
//! | word | bits  | field    | write            | write + atomic   | atomic            | drain          | barrier       |
//! |------|-------|----------|------------------|------------------|-------------------|----------------|---------------|
//! | 0    | 60-62 | kind     | 1                | 2                | 3                 | 4              | 5             |
//! | 0    | 59    | flag     | 0                | 1: in order      | 1: in order       | 1: up to index | 1: same rail  |
//! | 0    | 54-58 | channel  | channel          | channel          | channel           | 0              | channel       |
//! | 0    | 44-53 | rank     | to               | to               | to                | 0              | 0             |
//! | 0    | 32-43 | slot     | 0                | of the word      | of the word       | 0              | 0             |
//! | 0    | 0-31  | low      | from, in units   | from, in units   | value, low half   | index          | 0             |
//! | 1    | 48-62 | length   | units less one   | units less one   | 0                 | 0              | 0             |
//! | 1    | 32-47 | addend   | 0                | 16 bits, signed  | 0                 | 0              | 0             |
//! | 1    | 0-31  | high     | to, in units     | to, in units     | value, high half  | 0              | 0             |
//!
//! Offsets and lengths are in units of 16 bytes, the alignment of tokens, scales and metadata. So
//! 32 bits reach 64 GiB of symmetric memory, and 15 bits a write of 512 KiB. The value of a
//! standalone atomic has 64 bits. Unused bits must be 0 and are checked, so that kinds can gain
//! fields later.
//!
//! [`header`] is the same for C and CUDA.

use std::fmt::Write as _;

/// Bytes of the unit of offsets and lengths.
pub const UNIT: u64 = 16;
/// Ranks that a command can name.
pub const RANKS: usize = 1 << RANK.bits;
/// Channels that a command can name.
pub const CHANNELS: usize = 1 << CHANNEL.bits;
/// Atomic words that a rank can have.
pub const SLOTS: usize = 1 << SLOT.bits;
/// Bytes of the longest write.
pub const MAX_LEN: u64 = UNIT << LENGTH.bits;
/// The bit of each word that belongs to the FIFO.
pub const LAP: u64 = 1 << 63;

/// A field: its word, its lowest bit, and its width in bits.
#[derive(Clone, Copy)]
struct Field {
    name: &'static str,
    word: usize,
    shift: u32,
    bits: u32,
}

const KIND: Field = Field { name: "kind", word: 0, shift: 60, bits: 3 };
const FLAG: Field = Field { name: "flag", word: 0, shift: 59, bits: 1 };
const CHANNEL: Field = Field { name: "channel", word: 0, shift: 54, bits: 5 };
const RANK: Field = Field { name: "rank", word: 0, shift: 44, bits: 10 };
const SLOT: Field = Field { name: "slot", word: 0, shift: 32, bits: 12 };
const LOW: Field = Field { name: "low", word: 0, shift: 0, bits: 32 };
const LENGTH: Field = Field { name: "length", word: 1, shift: 48, bits: 15 };
const ADDEND: Field = Field { name: "addend", word: 1, shift: 32, bits: 16 };
const HIGH: Field = Field { name: "high", word: 1, shift: 0, bits: 32 };
const FIELDS: [Field; 9] = [KIND, FLAG, CHANNEL, RANK, SLOT, LOW, LENGTH, ADDEND, HIGH];

const WRITE: u64 = 1;
const WRITE_ATOMIC: u64 = 2;
const ATOMIC: u64 = 3;
const DRAIN: u64 = 4;
const BARRIER: u64 = 5;
const KINDS: [(&str, u64); 5] = [
    ("WRITE", WRITE),
    ("WRITE_ATOMIC", WRITE_ATOMIC),
    ("ATOMIC", ATOMIC),
    ("DRAIN", DRAIN),
    ("BARRIER", BARRIER),
];

/// A command as it is stored in a FIFO.
pub type Words = [u64; 2];

/// The field of a command that is wrong, and the rule it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {field} is {value}: {rule}")]
pub struct CommandError {
    pub kind: &'static str,
    pub field: &'static str,
    pub value: i64,
    pub rule: &'static str,
}

/// An addition to one of a rank's atomic words. It is applied after all writes that its sender
/// pushed before it, since the last atomic on the same channel and to the same rank (completion
/// fence, uccl-ep §3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Add {
    pub slot: u16,
    pub value: i64,
    /// Also after the earlier atomics of the same sender and channel (per-channel order).
    pub ordered: bool,
}

/// The ranks that a barrier waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    All,
    /// The ranks with the same index on their nodes.
    Rail,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Copies bytes from this rank's part of symmetric memory to another rank's. Offsets and length
    /// are bytes, multiples of [`UNIT`].
    Write {
        rank: u16,
        channel: u8,
        from: u64,
        to: u64,
        len: u64,
        add: Option<Add>,
    },
    Atomic {
        rank: u16,
        channel: u8,
        add: Add,
    },
    /// Completes when this FIFO's earlier commands have ended, so that their source bytes may be
    /// reused: all of them, or those up to an index, of which the lower 32 bits are given.
    Drain {
        up_to: Option<u32>,
    },
    /// Completes when all ranks have pushed one of the same scope and channel, each to the same
    /// thread.
    Barrier {
        scope: Scope,
        channel: u8,
    },
}

impl Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Write { add: None, .. } => "write",
            Self::Write { add: Some(_), .. } => "write with an atomic",
            Self::Atomic { .. } => "atomic",
            Self::Drain { .. } => "drain",
            Self::Barrier { .. } => "barrier",
        }
    }

    /// # Errors
    /// [`CommandError`] for a value that exceeds its field or is no multiple of the unit.
    pub fn encode(&self) -> Result<Words, CommandError> {
        let mut e = Encoder { words: [0; 2], kind: self.name() };
        match *self {
            Self::Write { rank, channel, from, to, len, add } => {
                e.put(KIND, if add.is_some() { WRITE_ATOMIC } else { WRITE })?;
                e.put(RANK, u64::from(rank))?;
                e.put(CHANNEL, u64::from(channel))?;
                e.put(LOW, e.units("source offset", from)?)?;
                e.put(HIGH, e.units("destination offset", to)?)?;
                let units = e.units("length", len)?;
                let less = units
                    .checked_sub(1)
                    .ok_or_else(|| e.field_error("length", 0, "must be at least 16 bytes"))?;
                e.put(LENGTH, less)?;
                if let Some(add) = add {
                    let addend = i16::try_from(add.value).map_err(|_| {
                        e.field_error(
                            "value",
                            add.value,
                            "must fit 16 bits beside a write; send the atomic alone",
                        )
                    })?;
                    e.put(FLAG, u64::from(add.ordered))?;
                    e.put(SLOT, u64::from(add.slot))?;
                    e.put(ADDEND, u64::from(addend as u16))?;
                }
            }
            Self::Atomic { rank, channel, add } => {
                e.put(KIND, ATOMIC)?;
                e.put(RANK, u64::from(rank))?;
                e.put(CHANNEL, u64::from(channel))?;
                e.put(FLAG, u64::from(add.ordered))?;
                e.put(SLOT, u64::from(add.slot))?;
                e.put(LOW, add.value as u64 & u64::from(u32::MAX))?;
                e.put(HIGH, add.value as u64 >> 32)?;
            }
            Self::Drain { up_to } => {
                e.put(KIND, DRAIN)?;
                e.put(FLAG, u64::from(up_to.is_some()))?;
                e.put(LOW, u64::from(up_to.unwrap_or(0)))?;
            }
            Self::Barrier { scope, channel } => {
                e.put(KIND, BARRIER)?;
                e.put(FLAG, u64::from(scope == Scope::Rail))?;
                e.put(CHANNEL, u64::from(channel))?;
            }
        }
        Ok(e.words)
    }

    /// Any 128 bits give a command or an error. The FIFO's bits are ignored.
    #[inline]
    pub fn decode(words: Words) -> Result<Self, CommandError> {
        let get = |field: Field| words[field.word] >> field.shift & ((1 << field.bits) - 1);
        let must_be_zero = |kind: &'static str, fields: &[Field]| {
            let wrong = fields.iter().find(|f| get(**f) != 0);
            wrong.map_or(Ok(()), |f| {
                let (field, value) = (f.name, get(*f) as i64);
                Err(CommandError { kind, field, value, rule: "must be 0" })
            })
        };
        let (rank, channel) = (get(RANK) as u16, get(CHANNEL) as u8);
        let ordered = get(FLAG) == 1;
        let slot = get(SLOT) as u16;
        match get(KIND) {
            kind @ (WRITE | WRITE_ATOMIC) => {
                let add = match kind == WRITE_ATOMIC {
                    true => {
                        let value = i64::from(get(ADDEND) as u16 as i16);
                        Some(Add { slot, value, ordered })
                    }
                    false => {
                        must_be_zero("write", &[FLAG, SLOT, ADDEND])?;
                        None
                    }
                };
                let (from, to) = (get(LOW) * UNIT, get(HIGH) * UNIT);
                Ok(Self::Write { rank, channel, from, to, len: (get(LENGTH) + 1) * UNIT, add })
            }
            ATOMIC => {
                must_be_zero("atomic", &[LENGTH, ADDEND])?;
                let value = (get(HIGH) << 32 | get(LOW)) as i64;
                Ok(Self::Atomic { rank, channel, add: Add { slot, value, ordered } })
            }
            DRAIN => {
                must_be_zero("drain", &[CHANNEL, RANK, SLOT, LENGTH, ADDEND, HIGH])?;
                if get(FLAG) == 0 {
                    must_be_zero("drain", &[LOW])?;
                }
                Ok(Self::Drain { up_to: (get(FLAG) == 1).then(|| get(LOW) as u32) })
            }
            BARRIER => {
                must_be_zero("barrier", &[RANK, SLOT, LOW, LENGTH, ADDEND, HIGH])?;
                let scope = if get(FLAG) == 1 { Scope::Rail } else { Scope::All };
                Ok(Self::Barrier { scope, channel })
            }
            other => Err(CommandError {
                kind: "command",
                field: "kind",
                value: other as i64,
                rule: "out of range [1, 5]",
            }),
        }
    }
}

struct Encoder {
    words: Words,
    kind: &'static str,
}

impl Encoder {
    fn field_error(&self, field: &'static str, value: i64, rule: &'static str) -> CommandError {
        CommandError { kind: self.kind, field, value, rule }
    }

    fn units(&self, field: &'static str, bytes: u64) -> Result<u64, CommandError> {
        match bytes % UNIT {
            0 => Ok(bytes / UNIT),
            _ => Err(self.field_error(field, bytes as i64, "must be a multiple of 16 bytes")),
        }
    }

    fn put(&mut self, field: Field, value: u64) -> Result<(), CommandError> {
        if value >> field.bits != 0 {
            let rule = match field.name {
                "rank" => "out of range [0, 1023]",
                "channel" => "out of range [0, 31]",
                "slot" => "out of range [0, 4095]",
                "length" => "must be at most 512 KiB; push several writes",
                _ => "must be below 64 GiB",
            };
            return Err(self.field_error(field.name, value as i64, rule));
        }
        self.words[field.word] |= value << field.shift;
        Ok(())
    }
}

/// The layout as a C header, for kernels.
pub fn header() -> String {
    let mut out = String::from(
        "/* 128-bit commands of the device-to-host channel; generated from native/proxy/src/command.rs */\n\
         #pragma once\n\n",
    );
    let mut define = |name: &str, value: u64| {
        writeln!(out, "#define FR_CMD_{name} {value}").expect("strings take everything");
    };
    define("UNIT", UNIT);
    define("LAP_BIT", u64::from(LAP.trailing_zeros()));
    for (name, kind) in KINDS {
        define(name, kind);
    }
    for field in FIELDS {
        let name = field.name.to_uppercase();
        define(&format!("{name}_WORD"), field.word as u64);
        define(&format!("{name}_SHIFT"), u64::from(field.shift));
        define(&format!("{name}_BITS"), u64::from(field.bits));
    }
    out
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn commands() -> impl Strategy<Value = Command> {
        let add = |values: std::ops::RangeInclusive<i64>| {
            (0..SLOTS as u16, values, any::<bool>()).prop_map(|(slot, value, ordered)| Add {
                slot,
                value,
                ordered,
            })
        };
        let units = 0..1u64 << 32;
        let to = (0..RANKS as u16, 0..CHANNELS as u8);
        prop_oneof![
            (
                to.clone(),
                units.clone(),
                units,
                1..=MAX_LEN / UNIT,
                proptest::option::of(add(-0x8000..=0x7fff))
            )
                .prop_map(|((rank, channel), from, to, len, add)| {
                    let (from, to, len) = (from * UNIT, to * UNIT, len * UNIT);
                    Command::Write { rank, channel, from, to, len, add }
                }),
            (to, add(i64::MIN..=i64::MAX)).prop_map(|((rank, channel), add)| Command::Atomic {
                rank,
                channel,
                add
            }),
            any::<Option<u32>>().prop_map(|up_to| Command::Drain { up_to }),
            (any::<bool>(), 0..CHANNELS as u8).prop_map(|(rail, channel)| Command::Barrier {
                scope: if rail { Scope::Rail } else { Scope::All },
                channel
            }),
        ]
    }

    proptest! {
        #[test]
        fn a_command_survives_its_encoding(command in commands()) {
            let words = command.encode().unwrap();
            prop_assert_eq!((words[0] | words[1]) & LAP, 0, "the FIFO's bits are free");
            prop_assert_eq!(Command::decode(words), Ok(command));
            prop_assert_eq!(Command::decode([words[0] | LAP, words[1] | LAP]), Ok(command));
        }

        #[test]
        fn any_128_bits_are_one_command_or_an_error(words in any::<[u64; 2]>()) {
            if let Ok(command) = Command::decode(words) {
                prop_assert_eq!(command.encode(), Ok([words[0] & !LAP, words[1] & !LAP]));
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let add = Add { slot: 1, value: 3, ordered: true };
        let write = |from, to, len, value| Command::Write {
            rank: 1,
            channel: 2,
            from,
            to,
            len,
            add: Some(Add { value, ..add }),
        };
        let cases = [
            (write(8, 0, 16, 0), "source offset"),
            (write(0, 8, 16, 0), "destination offset"),
            (write(0, 1 << 36, 16, 0), "high"),
            (write(0, 0, 0, 0), "length"),
            (write(0, 0, MAX_LEN + 16, 0), "length"),
            (write(0, 0, 16, 1 << 15), "value"),
            (Command::Atomic { rank: 1024, channel: 0, add }, "rank"),
            (Command::Atomic { rank: 0, channel: 32, add }, "channel"),
            (Command::Atomic { rank: 0, channel: 0, add: Add { slot: 4096, ..add } }, "slot"),
        ];
        for (command, field) in cases {
            assert_eq!(command.encode().unwrap_err().field, field, "{command:?}");
        }
        let atomic = Command::Atomic { rank: 0, channel: 0, add }.encode().unwrap();
        let long = Command::decode([atomic[0], atomic[1] | 1 << 48]).unwrap_err();
        assert_eq!(long.to_string(), "atomic: length is 1: must be 0");
        assert_eq!(Command::decode([0; 2]).unwrap_err().field, "kind", "untouched memory");
    }

    #[test]
    fn fields_fill_the_words_and_do_not_overlap() {
        let mut words = [LAP, LAP];
        for f in FIELDS {
            let mask = ((1u64 << f.bits) - 1) << f.shift;
            assert_eq!(words[f.word] & mask, 0, "{}", f.name);
            words[f.word] |= mask;
        }
        assert_eq!(words, [u64::MAX; 2]);
        assert!(header().contains("#define FR_CMD_SLOT_SHIFT 32\n"));
    }
}
