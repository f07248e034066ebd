//! Derives the handshake key from a token by Argon2id, so that guesses against a recorded mac are
//! slow.

use std::collections::HashMap;

use argon2::{Algorithm, Argon2, Params, Version};
use sha2::{Digest as _, Sha256};

use super::messages::Digest;
use crate::{domain::DomainError, locks::Mutex, process::PerProcess};

/// Argon2id: KiB of memory, passes, lanes.
const COST: (u32, u32, u32) = (19 << 10, 2, 1);

/// The salt is fixed: both sides derive the key before the first message, and an acceptor must not
/// run the function for each stranger that connects.
const SALT: &[u8] = b"fabric-ray handshake 2";

/// Bits of randomness below which a token is warned about.
const STRONG_BITS: f64 = 128.0;

/// The key of a token. Computed once per process (some 20 ms and 19 MiB).
///
/// # Errors
/// [`DomainError::Unavailable`] if the function refuses its input.
pub(crate) fn stretched(token: &[u8]) -> Result<Digest, DomainError> {
    // Keyed by digest, so that the table holds no token.
    static KEYS: PerProcess<Mutex<HashMap<Digest, Digest>>> = PerProcess::empty();
    let name: Digest = Sha256::digest(token).into();
    let mut keys = KEYS.get_or_default().lock();
    if let Some(key) = keys.get(&name) {
        return Ok(*key);
    }
    let bits = most_bits(token);
    if bits < STRONG_BITS {
        tracing::warn!(
            bytes = token.len(),
            "the token has at most {bits:.0} bits of randomness, expected {STRONG_BITS:.0}: a recorded \
             handshake lets an attacker guess it; draw one with `openssl rand -hex 32`"
        );
    }
    let failed = |e: argon2::Error| DomainError::Unavailable(format!("token: argon2: {e}"));
    let (memory, passes, lanes) = COST;
    let params = Params::new(memory, passes, lanes, None).map_err(failed)?;
    let mut key = [0; 32];
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into(token, SALT, &mut key)
        .map_err(failed)?;
    keys.insert(name, key);
    Ok(key)
}

/// Upper bound of a token's randomness, bits: all characters drawn from the smallest alphabet that
/// holds them.
fn most_bits(token: &[u8]) -> f64 {
    let all = |is: fn(&u8) -> bool| token.iter().all(is);
    let alphabet: usize = if all(u8::is_ascii_digit) {
        10
    } else if all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
        || all(|c| matches!(c, b'0'..=b'9' | b'A'..=b'F'))
    {
        16
    } else if all(u8::is_ascii_lowercase) || all(u8::is_ascii_uppercase) {
        26
    } else if all(|c| c.is_ascii_alphanumeric() || b"+/-_=".contains(c)) {
        64
    } else if all(u8::is_ascii_graphic) {
        94
    } else {
        256
    };
    let mut seen = [false; 256];
    token.iter().for_each(|c| seen[usize::from(*c)] = true);
    let distinct = seen.iter().filter(|s| **s).count();
    // With few distinct characters the token was not drawn from an alphabet.
    let alphabet = if distinct < 8 { distinct.max(1) } else { alphabet };
    token.len() as f64 * (alphabet as f64).log2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_one_key_and_another_token_another() {
        let key = stretched(b"one").unwrap();
        assert_eq!(stretched(b"one").unwrap(), key);
        assert_ne!(stretched(b"two").unwrap(), key);
        // Every build derives the same key; a change needs a new handshake version.
        let hex: String = key.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "65c4f281a8fb415a1146ca7414bfd624d9a858ffd0cea3e515dfca2e3aff5010");
    }

    #[test]
    fn randomness_is_bounded_by_length_and_alphabet() {
        let bits = |t: &str| most_bits(t.as_bytes()).round();
        assert_eq!(bits("0123456789abcdef0123456789abcdef"), 128.0);
        assert!(bits("yN2mUq0aQ8sV-5bX_1cD3g") >= 128.0, "secrets.token_urlsafe(16)");
        assert!(most_bits(&(0..16).map(|i| i * 15 + 3).collect::<Vec<u8>>()) >= 128.0);
        for weak in ["secret", "correct horse", "12345678901234567890", &"ab".repeat(40)] {
            assert!(bits(weak) < STRONG_BITS, "{weak}");
        }
        assert_eq!(bits(""), 0.0);
    }
}
