//! Rows in a tensor: equally long, at equal distances.

use fabric_engine::{EngineError, Result};

/// Rows of `width` bytes, each `stride` bytes behind the one before.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    pub bytes: &'a [u8],
    pub stride: usize,
    pub width: usize,
}

impl<'a> Part<'a> {
    /// Row `i`; empty if there is none.
    pub fn row(&self, i: usize) -> &'a [u8] {
        let begin = i * self.stride;
        self.bytes.get(begin..begin + self.width).unwrap_or(&[])
    }

    /// # Errors
    /// [`EngineError::Invalid`] if there are fewer rows.
    pub fn check(&self, what: &str, rows: u64) -> Result<()> {
        check(what, self.bytes.len(), self.stride, self.width, rows)
    }
}

/// As [`Part`], to be written.
#[derive(Debug)]
pub struct PartMut<'a> {
    pub bytes: &'a mut [u8],
    pub stride: usize,
    pub width: usize,
}

impl PartMut<'_> {
    /// Row `i`; empty if there is none.
    pub fn row(&mut self, i: usize) -> &mut [u8] {
        let begin = i * self.stride;
        self.bytes.get_mut(begin..begin + self.width).unwrap_or(&mut [])
    }

    /// # Errors
    /// [`EngineError::Invalid`] if there are fewer rows.
    pub fn check(&self, what: &str, rows: u64) -> Result<()> {
        check(what, self.bytes.len(), self.stride, self.width, rows)
    }
}

fn check(what: &str, len: usize, stride: usize, width: usize, rows: u64) -> Result<()> {
    let need = match rows {
        0 => 0,
        _ => (rows - 1).saturating_mul(stride as u64).saturating_add(width as u64),
    };
    match stride >= width && need <= len as u64 {
        true => Ok(()),
        false => Err(EngineError::Invalid(format!(
            "{what}: {rows} rows of {width} bytes, each {stride} behind the one before, don't lie in {len} bytes"
        ))),
    }
}
