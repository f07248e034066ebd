//! Blocks that peers write: encoding and checks.

use crate::{memory::ROUTES_HEADER, shape::Shape};

/// A source's counts of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutesBlock {
    /// Rows for each local expert.
    pub counts: Vec<u32>,
    pub rows: u64,
    /// Index of the first of these rows among all rows of the source; answers go there.
    pub first: u64,
    /// The number of the exchange among all ranks; 0 from a rank that knows no other rank yet.
    pub number: u32,
}

/// Exchanges of two ranks up to this one, and earlier ones of them that had answers.
pub type ExchangeNumber = (u32, u32);

/// The words of a routes block. `all` is the number of the exchange among all ranks.
pub fn routes_words(
    (exchange, combines): ExchangeNumber,
    all: u32,
    first: u64,
    counts: &[u32],
) -> Vec<u32> {
    let mut words = vec![exchange, first as u32, combines, all];
    words.extend(counts);
    words
}

/// # Errors
/// The violation: another exchange, or rows that no rank of this shape has (MR-3).
pub fn read_routes(
    shape: &Shape,
    number: ExchangeNumber,
    words: &[u32],
) -> Result<RoutesBlock, String> {
    let (head, counts) =
        words.split_at_checked(ROUTES_HEADER as usize).ok_or("its routes block is too short")?;
    if (head[0], head[2]) != number {
        return Err(format!(
            "it is in exchange {} with this rank after {} combines, and this rank in {} after {}; \
             have every rank call dispatch and combine in the same order",
            head[0], head[2], number.0, number.1
        ));
    }
    let rows: u64 = counts.iter().map(|n| u64::from(*n)).sum();
    let first = u64::from(head[1]);
    let most = counts.iter().copied().max().unwrap_or(0);
    if most > shape.max_tokens || rows > shape.pair_rows() || first + rows > shape.out_rows() {
        return Err(format!(
            "its routes are invalid: {rows} rows from {first}, {most} to one expert"
        ));
    }
    Ok(RoutesBlock { counts: counts.to_vec(), rows, first, number: head[3] })
}

/// Checks the number of the exchange that a peer reports. A new process has none and takes the
/// first one reported. All must be equal, or rows of different exchanges would mix (RS-1).
///
/// # Errors
/// The numbers differ.
pub fn agreed_number(own: u32, reported: u32, first: bool) -> Result<u32, String> {
    match (own, reported) {
        (0, any) => Ok(any),
        (known, 0) if first => Ok(known),
        (known, same) if known == same => Ok(known),
        _ => Err(format!(
            "it is in exchange {reported}, and this rank in {own}; have all ranks admit a new process \
             between the same two exchanges"
        )),
    }
}

/// The words of a slot offer.
pub fn slot_offer_words(exchange: u32, place: u64, rows: u64) -> Vec<u32> {
    vec![exchange, place as u32, rows as u32, 0]
}

/// Position and number of the next rows in the shared buffer of a destination. `left`: rows to
/// send.
///
/// # Errors
/// The violation: another exchange, more rows than are left, or a place outside the buffer (MR-3).
pub fn read_slot_offer(
    shape: &Shape,
    exchange: u32,
    left: u64,
    words: &[u32],
) -> Result<(u64, u64), String> {
    let [number, place, rows, _] = *words else { return Err("its slot offer is too short".into()) };
    let (place, rows, room) = (u64::from(place), u64::from(rows), shape.shared_rows());
    if number != exchange || rows == 0 || rows > left || place + rows > room {
        return Err(format!(
            "its slot offer is invalid: exchange {number}, expected {exchange}; {rows} rows of {left} from {place} of {room}"
        ));
    }
    Ok((place, rows))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{kernels::Float, AnswerFormat};

    fn shape() -> Shape {
        let back = AnswerFormat { elements: 4, float: Float::F32 };
        Shape {
            ranks: 3,
            experts: 6,
            topk: 3,
            max_tokens: 5,
            row_nbytes: 16,
            back,
            private_rows: 1,
            shared_rows: Some(8),
        }
    }

    #[test]
    fn blocks_decode_to_what_was_encoded() {
        let routes = read_routes(&shape(), (7, 3), &routes_words((7, 3), 9, 4, &[2, 5])).unwrap();
        assert_eq!(routes, RoutesBlock { counts: vec![2, 5], rows: 7, first: 4, number: 9 });
        assert_eq!(read_slot_offer(&shape(), 7, 6, &slot_offer_words(7, 2, 6)), Ok((2, 6)));
    }

    #[test]
    fn mr_3_invalid_blocks_are_refused() {
        let s = shape();
        let (late, other) =
            (routes_words((2, 0), 0, 0, &[1, 1]), routes_words((1, 1), 0, 0, &[1, 1]));
        for words in [vec![1, 0], late, other, routes_words((1, 0), 0, 0, &[6, 0])] {
            assert!(read_routes(&s, (1, 0), &words).is_err(), "{words:?}");
        }
        assert!(read_routes(&s, (1, 0), &routes_words((1, 0), 0, 14, &[1, 1])).is_err());
        for words in [vec![1, 0, 1], slot_offer_words(2, 0, 1), slot_offer_words(1, 0, 0)] {
            assert!(read_slot_offer(&s, 1, 3, &words).is_err(), "{words:?}");
        }
        assert!(read_slot_offer(&s, 1, 3, &slot_offer_words(1, 0, 4)).is_err());
        assert!(read_slot_offer(&s, 1, 3, &slot_offer_words(1, 6, 3)).is_err());
    }

    proptest! {
        /// For any contents, accepted values lie inside the buffer.
        #[test]
        fn mr_3_no_block_reaches_outside(words in prop::collection::vec(any::<u32>(), 0..8), near in any::<bool>()) {
            let s = shape();
            let words: Vec<u32> =
                words.into_iter().map(|w| if near { w % 7 } else { w }).collect();
            for exchange in [1, words.first().copied().unwrap_or(0)] {
                let number = (exchange, words.get(2).copied().unwrap_or(0));
                if let Ok(routes) = read_routes(&s, number, &words) {
                    prop_assert!(routes.first + routes.rows <= s.out_rows());
                    prop_assert!(routes.rows <= s.pair_rows());
                }
                if let Ok((place, rows)) = read_slot_offer(&s, exchange, 3, &words) {
                    prop_assert!(rows <= 3 && place + rows <= s.shared_rows());
                }
            }
        }
    }
}
