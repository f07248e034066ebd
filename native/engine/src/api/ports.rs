use std::fmt;

use crate::{EngineError, Result};

/// A range of ports, for users who must configure a firewall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    first: u16,
    last: u16,
}

impl Ports {
    /// # Errors
    /// [`EngineError::Invalid`] if there is no port between the two.
    pub fn new(first: u16, last: u16) -> Result<Self> {
        if first == 0 || first > last {
            return Err(EngineError::Invalid(format!(
                "ports {first} to {last}: name the first and the last, from 1 to 65535"
            )));
        }
        Ok(Self { first, last })
    }

    pub(crate) fn first(self) -> u16 {
        self.first
    }

    pub(crate) fn count(self) -> u16 {
        self.last - self.first + 1
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "port {}", self.first),
            false => write!(f, "ports {} to {}", self.first, self.last),
        }
    }
}
